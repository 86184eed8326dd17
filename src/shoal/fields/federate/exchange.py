"""What happens to an update between a client's training and the server's aggregation.

Stages of a client, in this order: an attack (of a client that is malicious), privacy, then the
compressor; of the server, the reverse.
Another stage is added here and nowhere else; both clocks pass through it. Malicious clients
collude: they pass through one exchange, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from shoal.core.parts import table
from shoal.core.random import seed64
from shoal.fields.federate.attacks.protocols import Attack, Coalition
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.learn.protocols import Examples
from shoal.fields.federate.privacy.guard import privacy_of
from shoal.fields.federate.protocols import (
    ClientScheduler,
    FederationInfo,
    LocalJob,
    RobustRule,
    Scheduling,
    UpdateCompressor,
)

Fit = Callable[[str], "tuple[np.ndarray, float]"]
"""The model float32 [P] after a job, learned from the examples of a client, and the mean loss."""


class Exchange:
    """Both ends of the way of an update.

    Args:
        job: names the stages.
        names: all clients, in their order; the first ``attackers`` of them are malicious.
    """

    def __init__(self, job: FederateJob, names: tuple[str, ...]) -> None:
        self._seed, self._clients = job.seed, len(names)
        self._malicious = names[: job.attackers]
        self._attack: Attack | None = None
        if job.attack is not None:
            self._attack = table("attack").build(job.attack, where="attack")
        self.compressor: UpdateCompressor = table("update_compressor").build(
            job.compressor, where="compressor"
        )
        self.privacy = privacy_of(job, names)
        # What malicious clients have learned from a version of the model.
        self._stolen: tuple[int, np.ndarray] | None = None
        # Of a contractive compressor: what it has left out so far, by client.
        self._left: dict[str, np.ndarray] = {}

    def key(self, job: LocalJob) -> int:
        """Shared by client and server without being sent."""
        return seed64(self._seed, purpose="compressed update", step=job.number)

    def examples(self, client: str, examples: Examples) -> Examples:
        """What a client learns from."""
        if self._attack is None or client not in self._malicious:
            return examples
        return self._attack.examples(examples)

    def learn(self, job: LocalJob, model: np.ndarray, fit: Fit) -> tuple[np.ndarray, float]:
        """The change float32 [P] that a client claims after a job, and its loss.

        Args:
            job: that it was asked to do.
            model: from which it starts, float32 [P].
            fit: does the job.
        """
        after, loss = fit(job.client)
        delta = model - after
        if self._attack is None or job.client not in self._malicious:
            return delta, loss

        def learned() -> np.ndarray:
            if self._stolen is None or self._stolen[0] != job.version:
                updates = [model - fit(client)[0] for client in self._malicious]
                self._stolen = job.version, np.stack(updates)
            return self._stolen[1]

        coalition = Coalition(seed=self._seed, clients=self._clients, learned=learned)
        return self._attack.poison(delta, job, coalition), loss

    def attach(self, job: LocalJob) -> dict[str, np.ndarray]:
        """What the server sends with a job, beside the model."""
        return {}

    def answer(
        self, job: LocalJob, model: np.ndarray, given: Mapping[str, np.ndarray], fit: Fit
    ) -> tuple[Mapping[str, np.ndarray], float]:
        """What a client sends for a job, and its loss.

        Args:
            job: that it was asked to do.
            model: from which it starts, float32 [P].
            given: what came with the job.
            fit: does the job.
        """
        delta, loss = self.learn(job, model, fit)
        return self.encode(job, delta), loss

    def scheduling(
        self, inner: Scheduling, scheduler: ClientScheduler, info: FederationInfo
    ) -> Scheduling:
        """A scheduler at work, with what the exchange needs around its jobs."""
        return inner

    def rule(self, rule: RobustRule) -> RobustRule:
        """The rule, for updates as they arrive."""
        return rule

    def encode(self, job: LocalJob, delta: np.ndarray) -> Mapping[str, np.ndarray]:
        """What a client sends of its change float32 [P]."""
        delta = self.privacy.share(delta, job)
        if self.compressor.kind == "contractive":
            delta = delta + self._left.get(job.client, np.float32(0))
        tensors = self.compressor.encode(delta, self.key(job))
        if self.compressor.kind == "contractive":
            self._left[job.client] = delta - self._decompress(job, tensors, len(delta))
        return tensors

    def client_state(self, client: str) -> dict[str, np.ndarray]:
        """What a client keeps between its updates, by name."""
        return {"left": self._left[client]} if client in self._left else {}

    def load_client(self, client: str, state: Mapping[str, np.ndarray]) -> None:
        """Go on from such a state."""
        self._left.pop(client, None)
        if "left" in state:
            self._left[client] = state["left"]

    def decode(self, job: LocalJob, tensors: Mapping[str, np.ndarray], size: int) -> np.ndarray:
        """The change float32 [P] that arrives at the server.

        Raises:
            UpdateRefusedError: the tensors are not what the compressor writes.
        """
        return self.privacy.bound(self._decompress(job, tensors, size))

    def _decompress(
        self, job: LocalJob, tensors: Mapping[str, np.ndarray], size: int
    ) -> np.ndarray:
        return self.compressor.decode(tensors, size, self.key(job))

    def state(self) -> dict[str, np.ndarray]:
        """What it remembers between updates, by name."""
        return {
            **{f"left.{name}": left for name, left in self._left.items()},
            **{f"privacy.{name}": one for name, one in self.privacy.state().items()},
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from such a state."""
        self._left = {name[5:]: one for name, one in state.items() if name.startswith("left.")}
        self.privacy.load(
            {name[8:]: one for name, one in state.items() if name.startswith("privacy.")}
        )


def exchange_of(job: FederateJob, names: tuple[str, ...]) -> Exchange:
    """The exchange of a job.

    Raises:
        FederationError: parts of the job do not go together.
    """
    if not job.secure:
        return Exchange(job, names)
    from shoal.fields.federate.secure.exchange import SecureExchange

    return SecureExchange(job, names)
