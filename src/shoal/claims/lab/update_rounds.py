"""Rounds of updates through an aggregation plane, without a federation around it.

Clients are threads that send the same updates in every round; a server that takes each and says at
once what it weighs. What the plane has taken of the processors is what its processes say of
themselves.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from shoal.core.random import generator
from shoal.fields.federate.aggregate.sums import weighted_sum
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.planes.protocols import AggregationPlane, PlaneWork
from shoal.fields.federate.protocols import LocalJob, Update
from shoal.fields.federate.wire.bodies import forward
from shoal.fields.federate.wire.messages import pack


@contextlib.contextmanager
def driven(plane: AggregationPlane, size: int, count: int) -> Iterator[UpdateRounds]:
    """A plane and its clients, as long as the block takes.

    Args:
        plane: the part.
        size: numbers of an update.
        count: clients.
    """
    driver = UpdateRounds(plane, size, count)
    with contextlib.closing(driver.plane):
        yield driver


class UpdateRounds:
    """Clients of a plane: two at a time send the same updates in every round."""

    def __init__(self, plane: AggregationPlane, size: int, count: int) -> None:
        self._names = tuple(f"c{at}" for at in range(count))
        self._keys = {name: f"key of client {name}" for name in self._names}
        draw = generator(0, purpose="updates of clients")
        # Few that differ: what is sent is as long, and the clients' memory is not the question.
        self._deltas = [draw.standard_normal(size, dtype=np.float32) for _ in range(4)]
        self._bodies = [memoryview(pack({"delta": one}, {"loss": 1.0})) for one in self._deltas]
        weights = [sum(range(at + 1, count + 1, 4)) for at in range(4)]
        self._wanted = weighted_sum(self._deltas, weights)
        self._lock, self._number = threading.Lock(), 0
        job = FederateJob(clients=str(count)).model_dump(mode="json")
        work = PlaneWork(
            size=size, keys=self._keys, job=job, names=self._names, folds=True, arrived=self._fold
        )
        self.plane = plane.start(work)

    def _fold(self, update: Update) -> Future[str | None]:
        with self._lock:
            self.plane.fold(update, float(self._names.index(update.client) + 1))
        taken: Future[str | None] = Future()
        taken.set_result(None)
        return taken

    def _send(self, at: int) -> None:
        name, number = self._names[at], self._number + at
        with self._lock:
            job = LocalJob(number=number, client=name, version=0, steps=1, started=0.0)
            address = self.plane.address(job)
        url = f"http://127.0.0.1{address}/v1/clients/{name}/updates/{number}"
        status, text = forward(url, self._bodies[at % 4], f"Bearer {self._keys[name]}")
        assert status == 200, text

    def round(self) -> dict[str, float]:
        """Seconds of a round, those of the processors of the plane, and the error of the sum."""
        before, begin = self.plane.facts()["cpu_s"], time.perf_counter()
        with ThreadPoolExecutor(2) as senders:
            list(senders.map(self._send, range(len(self._names))))
        total = self.plane.total()
        wall = time.perf_counter() - begin
        self._number += len(self._names)
        error = float(np.abs(total - self._wanted).max() / np.abs(self._wanted).max())
        return {"wall_s": wall, "cpu_s": self.plane.facts()["cpu_s"] - before, "error": error}
