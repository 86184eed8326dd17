"""Aggregators that are reached over HTTP, directly or through a broker and sidecars.

The baselines of LIFL, with its aggregation and its hierarchy: on each host a leaf for each core,
and a middle; one top. They always run. With ``relays`` every message between processes goes through
a broker and through a sidecar of its receiver, as in serverless platforms.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.federate.planes.protocols import PlaneWork
from shoal.fields.federate.planes.remote import SUM_S, RemoteSums
from shoal.fields.federate.protocols import FederationError, LocalJob, Update
from shoal.fields.federate.wire.messages import HEADER_BYTES

_RELAY = "shoal.fields.federate.planes.relay"


@part
class Broker:
    """Updates travel between the processes of aggregators as bodies of HTTP requests.

    Args:
        hosts: emulated ones.
        fan_in: updates of a leaf, after which it sends its sum to its middle.
        workers: leaves of a host; 0 for one for each core that it has.
        relays: send every message through a broker and a sidecar; else directly.
        tree: leaves and middles below the top; else the top takes all updates itself.
    """

    hosts: Annotated[int, Ge(1), Le(64)] = 1
    fan_in: Annotated[int, Ge(1)] = 2
    workers: Annotated[int, Ge(0), Le(32)] = 0
    relays: bool = True
    tree: bool = True

    distributed: ClassVar = True
    node: ClassVar = "shoal.fields.federate.planes.node"
    """Module of an aggregator's process."""

    def start(self, work: PlaneWork) -> BrokerRun:
        """Start all processes.

        Raises:
            FederationError: the rule is no sum, there is TLS, or a process does not start.
        """
        return BrokerRun(self, work)


class BrokerRun(RemoteSums):
    """The plane at work.

    Args:
        part: its options.
        work: what it is for.
    """

    def __init__(self, part: Broker, work: PlaneWork) -> None:
        if work.job["certfile"]:
            raise FederationError("plane: broker speaks no TLS; choose plane: lifl or direct")
        super().__init__(work, "broker")
        self._token = secrets.token_hex(16)
        leaves = part.workers or max(1, (os.cpu_count() or 1) // part.hosts)
        given = {
            "size": work.size,
            "token": self._token,
            "keys": dict(work.keys),
            "names": list(work.names),
            "job": dict(work.job),
            "fan_in": part.fan_in,
        }
        try:
            self._top = self._processes.start(part.node, given)
            hosts = range(part.hosts if part.tree else 0)
            self._middles = [self._processes.start(part.node, given) for _ in hosts]
            self._leaves = [
                [self._processes.start(part.node, given) for _ in range(leaves)] for _ in hosts
            ] or [[self._top]]
            numbers = [*range(len(self._processes.members))]
            self._addresses = self._relayed(numbers) if part.relays else self._direct(numbers)
            self._processes.ready()
            self._connect()
        except BaseException:
            self.close()
            raise
        self._fan_in = part.fan_in
        self._given = 0
        self._at: dict[int, int] = {}

    def _direct(self, numbers: list[int]) -> dict[int, str]:
        return {one: f":{self._processes.members[one].port}" for one in numbers}

    def _relayed(self, numbers: list[int]) -> dict[int, str]:
        """A sidecar for each node, and the broker before them."""
        most = 4 * self._work.size + HEADER_BYTES
        ports = {one: self._processes.members[one].port for one in numbers}
        sidecars = {
            one: self._processes.members[
                self._processes.start(_RELAY, {"most": most, "ports": [port]})
            ].port
            for one, port in ports.items()
        }
        broker = self._processes.start(_RELAY, {"most": most, "ports": [*sidecars.values()]})
        first = self._processes.members[broker].port
        return {one: f":{first}/to/{sidecars[one]}/to/{port}" for one, port in ports.items()}

    def _connect(self) -> None:
        def url(one: int) -> str:
            return f"http://127.0.0.1{self._addresses[one]}/v1/sums"

        for middle, leaves in zip(self._middles, self._leaves, strict=False):
            self._processes.say(middle, "up", url=url(self._top))
            for leaf in leaves:
                self._processes.say(leaf, "up", url=url(middle))

    def _place(self, at: int, **words: Any) -> int:
        return at

    # The coordinator's

    def fold(self, update: Update, weight: float) -> None:
        """The node that has it adds it."""
        self._processes.say(update.delta, "fold", number=update.number, weight=weight)

    def total(self) -> np.ndarray:
        """Leaves send what they have to their middles, and middles to the top."""
        for level in ([one for host in self._leaves for one in host], self._middles, [self._top]):
            for one in level:
                self._processes.say(one, "flush")
            for _ in level:
                self.next_sum()
        self._at.clear()
        return self._fetch()

    def _fetch(self) -> np.ndarray:
        """The sum of the top; its last way is direct in any case."""
        port = self._processes.members[self._top].port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SUM_S)
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {self._token}"}
            try:
                connection.request("GET", "/v1/sums", headers=headers)
                answer = connection.getresponse()
                result = np.empty(self._work.size, np.float32)
                room, at = memoryview(result.data).cast("B"), 0
                while at < len(room) and (size := answer.readinto(room[at:])):
                    at += size
            except (OSError, http.client.HTTPException) as cause:
                raise FederationError(f"plane: the top gave no sum: {cause!r}") from cause
        if answer.status != 200 or at != len(room):
            raise FederationError(f"plane: the top gave {at} bytes of a sum of {len(room)}")
        return result

    def drop(self, update: Update) -> None:
        """The node forgets it."""
        self._processes.say(update.delta, "drop", number=update.number)

    def partial(self) -> np.ndarray | None:
        """None: what nodes have is not saved."""
        return None

    def address(self, job: LocalJob) -> str:
        """Leaves take ``fan_in`` updates each, in turn, host by host."""
        if job.number not in self._at:
            leaves = [one for row in zip(*self._leaves, strict=True) for one in row]
            self._at[job.number] = leaves[(self._given // self._fan_in) % len(leaves)]
            self._given += 1
        return self._addresses[self._at[job.number]]
