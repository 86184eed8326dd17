"""LIFL: gateways, stores and aggregators of all hosts, as the server of a federation sees them.

Source: Qi et al., LIFL: A Lightweight, Event-driven Serverless Platform for Federated Learning,
2024.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.fields.federate.lifl.placement import BestFitPlacement
from shoal.fields.federate.lifl.store import ObjectStore, ObjectStoreError
from shoal.fields.federate.planes.protocols import PlaneWork
from shoal.fields.federate.planes.remote import RemoteSums
from shoal.fields.federate.protocols import FederationError, LocalJob, Update
from shoal.fields.federate.wire.messages import HEADER_BYTES


@part
class Lifl:
    """Updates go into shared memory once, and processes that come and go are sent their keys.

    Args:
        hosts: emulated ones, each with a gateway, a store and aggregators of its own.
        capacity: updates that a host can aggregate in a round, MC_i; hosts are filled in turn.
        fan_in: updates of a leaf, I.
        workers: aggregators of a host at most; 0 for one for each core that it has.
        eager: add updates as they arrive; else a leaf waits for all of its own.
        reuse: let an aggregator that has finished take another task, at any level.
        keep_s: seconds for which an idle aggregator stays.
        store_bytes: of a host's store; a client that finds it full is answered 503, and waits.
    """

    hosts: Annotated[int, Ge(1), Le(64)] = 1
    capacity: Annotated[int, Ge(1)] = 1_000_000
    fan_in: Annotated[int, Ge(1)] = 2
    workers: Annotated[int, Ge(0), Le(32)] = 0
    eager: bool = True
    reuse: bool = True
    keep_s: Annotated[float, Gt(0)] = 30.0
    store_bytes: Annotated[float, Gt(0)] = 2e9

    distributed: ClassVar = True

    def start(self, work: PlaneWork) -> LiflRun:
        """Start the gateways; aggregators are started by need.

        Raises:
            FederationError: the rule is no sum, the store is small, or a gateway does not start.
        """
        return LiflRun(self, work)


@dataclass(frozen=True, slots=True)
class StoredUpdate:
    """Where an update is.

    Args:
        host: number of the host.
        key: in its store.
    """

    host: int
    key: str


class LiflRun(RemoteSums):
    """The plane at work.

    Args:
        part: its options.
        work: what it is for.
    """

    def __init__(self, part: Lifl, work: PlaneWork) -> None:
        super().__init__(work, "lifl")
        self._part = part
        self._fit = BestFitPlacement([part.capacity] * part.hosts)
        self._placed: dict[int, int] = {}
        self._folded = [0] * part.hosts
        self._stores: list[ObjectStore] = []
        try:
            token = secrets.token_hex(16)
            for _ in range(part.hosts):
                self._start(token)
            self._processes.ready()
        except BaseException:
            self.close()
            raise

    def _start(self, token: str) -> None:
        part, work = self._part, self._work
        most = part.workers or max(1, (os.cpu_count() or 1) // part.hosts)
        room = 4 * work.size + HEADER_BYTES
        slots = int(part.store_bytes // room)
        if slots < most + 4:
            raise FederationError(
                f"store_bytes: {part.store_bytes:g} hold {slots} updates of {room} B; at least "
                f"{most + 4} are needed, {(most + 4) * room} B"
            )
        try:
            store = ObjectStore.create(min(slots, 4096), room)
        except ObjectStoreError as cause:
            raise FederationError(f"plane: {cause}") from cause
        self._stores.append(store)
        given = {
            "size": work.size,
            "file": store.file,
            "slots": store.slots,
            "slot_bytes": store.slot_bytes,
            "keys": dict(work.keys),
            "names": list(work.names),
            "job": dict(work.job),
            "token": token,
            "tree": {
                "fan_in": part.fan_in,
                "most": most,
                "eager": part.eager,
                "reuse": part.reuse,
                "keep_s": part.keep_s,
            },
        }
        self._processes.start("shoal.fields.federate.lifl.gateway", given, (store.file,))

    def _place(self, at: int, **words: Any) -> StoredUpdate:
        return StoredUpdate(at, words["key"])

    # The coordinator's

    def fold(self, update: Update, weight: float) -> None:
        """Its gateway gives it to an aggregator."""
        stored: StoredUpdate = update.delta
        self._folded[stored.host] += 1
        self._processes.say(stored.host, "fold", key=stored.key, weight=weight)

    def total(self) -> np.ndarray:
        """Hosts stream their sums to the first one, which is the server's own."""
        scheme = "https" if self._work.job["certfile"] else "http"
        host = self._processes.host
        here = f"[{host}]" if ":" in host else host
        to = f"{scheme}://{here}:{self._processes.members[0].port}"
        busy = [at for at in range(1, self._part.hosts) if self._folded[at]]
        for at in busy:
            self._processes.say(at, "flush", expected=0, to=to)
        self._processes.say(0, "flush", expected=len(busy), to="")
        missing, key = {0, *busy}, None
        while missing:
            at, words = self.next_sum()
            missing.discard(at)
            key = words["key"] or key
        assert key is not None
        numbers, _ = self._stores[0].get(bytes.fromhex(key))
        result = numbers.copy()
        self._processes.say(0, "free", key=key)
        self._folded = [0] * self._part.hosts
        self._fit.clear()
        self._placed.clear()
        return result

    def drop(self, update: Update) -> None:
        """Its slot is free again."""
        self._processes.say(update.delta.host, "drop", key=update.delta.key)

    def partial(self) -> np.ndarray | None:
        """None between aggregations.

        Raises:
            FederationError: in the midst of one; processes hold what cannot be saved.
        """
        if any(self._folded):
            raise FederationError("plane: lifl cannot be saved in the midst of an aggregation")
        return None

    def address(self, job: LocalJob) -> str:
        """The gateway of the host on which the update is placed."""
        if job.number not in self._placed:
            self._placed[job.number] = self._fit.place()
        return f":{self._processes.members[self._placed[job.number]].port}"

    def close(self) -> None:
        """End the gateways, and with them all else."""
        super().close()
        for store in self._stores:
            store.close()
        self._stores = []
