"""What the robust rules share: updates that are usable, distances, sorting by coordinate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from shoal.fields.federate.aggregate.sums import weighted_sum
from shoal.fields.federate.protocols import Arrived, FederationError

Attackers = Annotated[int, Ge(0)] | Literal["auto"]
"""Wrong updates that a rule assumes; ``auto``: as many as it covers, but less than a third."""

# Numbers of all updates together that stay in the cache while their coordinates are sorted.
_BLOCK = 1 << 17


@dataclass(frozen=True, eq=False)
class Usable:
    """The finite updates of an aggregation.

    Args:
        deltas: each float32 [P].
        clients: whose they are.
        scale: sum of all weights; a combined update is multiplied by it.
    """

    deltas: Sequence[np.ndarray]
    clients: Sequence[str]
    scale: float

    def __len__(self) -> int:
        return len(self.deltas)

    def only(self, rows: Sequence[int] | np.ndarray) -> Usable:
        """Some of the updates."""
        return Usable(
            [self.deltas[at] for at in rows], [self.clients[at] for at in rows], self.scale
        )

    def part(self, begin: int, end: int) -> Usable:
        """The same updates, of some coordinates."""
        return Usable([one[begin:end] for one in self.deltas], self.clients, self.scale)

    def sum(self, weights: np.ndarray) -> np.ndarray:
        """Sum of the updates, each times its weight and the scale: float32 [P]."""
        return weighted_sum(self.deltas, weights * self.scale)


def usable(arrived: Arrived) -> Usable:
    """Leave out updates with numbers that are not finite, and report whose they are.

    Weights do not count: a client says itself how many examples it has.
    """
    good = [bool(np.isfinite(one.sum(dtype=np.float64))) for one in arrived.deltas]
    clients = [job.client for job in arrived.jobs]
    if not all(good):
        arrived.report["excluded"] = [
            client for client, fine in zip(clients, good, strict=True) if not fine
        ]
    return Usable(
        [one for one, fine in zip(arrived.deltas, good, strict=True) if fine],
        [client for client, fine in zip(clients, good, strict=True) if fine],
        float(arrived.weights.sum()),
    )


def assumed(f: Attackers, count: int, most: int, rule: str, needs: str) -> int:
    """How many of ``count`` updates a rule takes for wrong.

    Args:
        f: the option.
        count: updates.
        most: that the rule covers among so many; negative if they are too few for it.
        rule: its name.
        needs: how many updates it needs, such as ``2 f + 3``.

    Raises:
        FederationError: it does not cover so many.
    """
    wanted = max(0, min(most, (count - 1) // 3)) if f == "auto" else f
    if wanted > most:
        raise FederationError(
            f"robust = {rule}: {count} updates with f = {wanted} wrong ones; {needs} are needed. "
            + (f"Take f = {most}, or more clients" if most >= 0 else "Take more clients")
        )
    return wanted


def gram(deltas: Sequence[np.ndarray]) -> np.ndarray:
    """Inner products of K updates, float64 [K, K]; one pass, blocked over P."""
    count = len(deltas)
    result = np.zeros((count, count))
    for block in blocks(deltas):
        wide = block.astype(np.float64)
        result += wide @ wide.T
    return result


def distances(deltas: Sequence[np.ndarray]) -> np.ndarray:
    """Squared distances between K updates, float64 [K, K]."""
    products = gram(deltas)
    norms = np.diag(products)
    result: np.ndarray = np.maximum(norms[:, None] + norms - 2 * products, 0.0)
    np.fill_diagonal(result, 0.0)
    return result


def blocks(deltas: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The updates in pieces float32 [K, B]; each is a copy that the caller may change."""
    width = max(1024, _BLOCK // len(deltas))
    for at in range(0, len(deltas[0]), width):
        yield np.stack([delta[at : at + width] for delta in deltas])


def sort_columns(block: np.ndarray) -> list[np.ndarray]:
    """K rows [B] whose numbers ascend from row to row in every column; ``block`` is used up.

    A network of comparisons works on whole rows, several times faster than sorting column by
    column.

    Source: Knuth, The Art of Computer Programming, volume 3, 1998, algorithm 5.2.2M (Batcher).
    """
    rows, spare = list(block), np.empty_like(block[0])
    top = 1 << max(0, (len(rows) - 1).bit_length() - 1)
    step = top
    while len(rows) > 1 and step:
        reach, wanted, apart = top, 0, step
        while True:
            for i in range(len(rows) - apart):
                if i & step == wanted:
                    j = i + apart
                    np.minimum(rows[i], rows[j], out=spare)
                    np.maximum(rows[i], rows[j], out=rows[j])
                    rows[i], spare = spare, rows[i]
            if reach == step:
                break
            apart, reach, wanted = reach - step, reach // 2, step
        step //= 2
    return rows


def krum_scores(apart: np.ndarray, f: int) -> np.ndarray:
    """Sum of the squared distances to the n - f - 2 nearest others, [n].

    Args:
        apart: squared distances, [n, n].
        f: wrong updates that are assumed.

    Source: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent, 2017, section 4.
    """
    near = max(1, len(apart) - f - 2)
    # The nearest of all is the update itself, at distance 0.
    scores: np.ndarray = np.sort(apart, axis=1)[:, : near + 1].sum(1)
    return scores


def krum_best(apart: np.ndarray, f: int) -> int:
    """The update with the smallest score.

    Two that are each other's nearest have the same score where only one neighbour counts; of those
    the one that is nearer to all updates is taken, so that the order of clients plays no part.
    """
    scores = krum_scores(apart, f)
    ties = np.flatnonzero(scores <= scores.min() * (1 + 1e-9))
    return int(ties[apart[ties].sum(1).argmin()])
