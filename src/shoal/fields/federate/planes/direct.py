"""The server itself receives updates and sums them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.fields.federate.aggregate.sums import add_weighted, all_finite
from shoal.fields.federate.planes.protocols import PlaneWork
from shoal.fields.federate.protocols import LocalJob, Update, UpdateRefusedError


@part
class Direct:
    """Updates are added in the process of the server, as they arrive."""

    distributed: ClassVar = False

    def start(self, work: PlaneWork) -> LocalSum:
        """With an empty sum."""
        return LocalSum()


class LocalSum:
    """A sum in this process."""

    distributed: ClassVar = False

    def __init__(self) -> None:
        self._sum: np.ndarray | None = None

    def check(self, update: Update, size: int) -> None:
        """Its type, shape and numbers."""
        where = f"update {update.number} of {update.client}"
        delta = update.delta
        if delta.shape != (size,) or delta.dtype != np.float32:
            raise UpdateRefusedError(
                f"{where}: {delta.dtype} {list(delta.shape)}; float32 [{size}] are expected",
                reason="shape",
            )
        if not all_finite(delta):
            raise UpdateRefusedError(
                f"{where}: has numbers that are not finite", reason="not finite"
            )

    def fold(self, update: Update, weight: float) -> None:
        """Add it in place."""
        fresh = self._sum is None
        if self._sum is None:
            self._sum = np.empty_like(update.delta)
        add_weighted(self._sum, [update.delta], [weight], fresh=fresh)

    def total(self) -> np.ndarray:
        """The sum."""
        assert self._sum is not None
        result, self._sum = self._sum, None
        return result

    def drop(self, update: Update) -> None:
        """Nothing holds it."""

    def partial(self) -> np.ndarray | None:
        """A copy of the sum."""
        return None if self._sum is None else self._sum.copy()

    def resume(self, partial: np.ndarray) -> None:
        """Go on with a copy of it."""
        self._sum = partial.copy()

    def address(self, job: LocalJob) -> str:
        """The server's own."""
        return ""

    def facts(self) -> Mapping[str, float]:
        """Everything comes to the server, which counts it."""
        return {"up_bytes": 0.0}

    def close(self) -> None:
        """There are no processes."""


def verdict_of(verdict: Future[str | None]) -> str | None:
    """Why an update is refused; None if it is taken."""
    if verdict.cancelled() or verdict.exception() is not None:
        return "the run is over"
    return verdict.result()
