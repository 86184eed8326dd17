"""The way of an update under secure aggregation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shoal.fields.federate.exchange import Exchange, Fit
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.protocols import (
    ClientScheduler,
    DrawsClients,
    FederationError,
    FederationInfo,
    LocalJob,
    RobustRule,
    Scheduling,
)
from shoal.fields.federate.secure.party import KEYS, SHARES, TRAIN, Party
from shoal.fields.federate.secure.rounds import SecureScheduling, SecureServer, SecureSum


class SecureExchange(Exchange):
    """An exchange whose server sees masked updates only.

    Raises:
        FederationError: a part of the job needs to see them.
    """

    def __init__(self, job: FederateJob, names: tuple[str, ...]) -> None:
        super().__init__(job, names)
        if len(names) < 3:
            raise FederationError(
                f"secure: {len(names)} clients; a sum of fewer than 3 hides no update"
            )
        if self.compressor.omega(1024) != 1.0:
            raise FederationError(
                f"secure: compressor = {job.compressor.name} loses numbers, and masked ones cannot "
                "be compressed; take identity"
            )
        if self.privacy.reads:
            raise FederationError(
                "secure: this privacy has the server bound each update, which it cannot see; let "
                "clients do it (privacy: {name: dp, by: clients})"
            )
        self._server = SecureServer({})
        self._parties: dict[str, Party] = {}

    def scheduling(
        self, inner: Scheduling, scheduler: ClientScheduler, info: FederationInfo
    ) -> Scheduling:
        """Rounds with the exchanges of the protocol."""
        if not isinstance(scheduler, DrawsClients):
            raise FederationError(
                "secure: needs an algorithm whose rounds have fixed clients, such as fedavg"
            )
        samples = {client.name: client.samples for client in info.clients}
        self._server = SecureServer(samples)
        return SecureScheduling(inner, self._server, info)

    def rule(self, rule: RobustRule) -> RobustRule:
        """Opens sums."""
        if not rule.linear:
            raise FederationError(
                "secure: needs robust = mean; a rule that compares updates must see them"
            )
        return SecureSum(self._server)

    def attach(self, job: LocalJob) -> dict[str, np.ndarray]:
        """What the client needs for this exchange."""
        return self._server.attach(job.client)

    def answer(
        self, job: LocalJob, model: np.ndarray, given: Mapping[str, np.ndarray], fit: Fit
    ) -> tuple[Mapping[str, np.ndarray], float]:
        """Keys, shares, a masked update, or what opens the sum."""
        party = self._parties.setdefault(job.client, Party())
        phase = int(given["phase"][0])
        if phase == KEYS:
            return party.keys(), 0.0
        if phase == SHARES:
            return party.shares(given), 0.0
        if phase == TRAIN:
            delta, loss = self.learn(job, model, fit)
            shared = self.privacy.share(delta, job)
            return party.masked(shared * np.float32(given["share"][0]), given), loss
        return party.reveal(given), 0.0

    def decode(self, job: LocalJob, tensors: Mapping[str, np.ndarray], size: int) -> np.ndarray:
        """Zeros: of a masked update nothing is known."""
        self._server.take(job.client, tensors, size)
        return np.zeros(size, np.float32)
