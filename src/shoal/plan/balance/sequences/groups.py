"""Groups of ranks with degrees of their own for the sequences of one micro-batch, in one pass.

The integer program: groups g of degree d_g, of which m_g says whether it is used, and numbers
x_gq of sequences of bucket q in it. Minimise t with

    sum_q x_gq (alpha s_q^2 + beta s_q + exchange(s_q, d_g)) / d_g + gamma m_g <= t
    sum_q x_gq s_q <= C d_g m_g,    sum_g x_gq = n_q,    sum_g d_g m_g <= N

and groups of one degree used in order. HiGHS solves it. Beside it stands a search without a
solver: longest processing time first for every way to cut N ranks in powers of two, of which those
with one degree alone are the homogeneous plans; no answer is worse than the best of these.

Source: Wang et al., FlexSP, 2024, section 4.1, equations 17 to 22; Huangfu and Hall, HiGHS, 2018.

Differs: every degree has all the groups that fit into N, where the paper gives them in advance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shoal.cost.training.sequences import Exchange, SequenceCost
from shoal.plan.balance.sequences.buckets import bucketed

# Ways to cut the ranks that are tried without a solver.
_MOST_CUTS = 128


class Groups(NamedTuple):
    """One micro-batch on groups.

    Args:
        seconds: of the slowest group; infinite where nothing fits.
        groups: (degree, numbers of its sequences) of each.
        proven: no plan with these buckets is faster.
    """

    seconds: float
    groups: tuple[tuple[int, tuple[int, ...]], ...] = ()
    proven: bool = False


class RankPool(NamedTuple):
    """Ranks, and what they hold.

    Args:
        ranks: N, a power of two.
        capacity: tokens that one rank holds, C.
        cost: of the passes.
        exchange: how ranks of a group share attention.
    """

    ranks: int
    capacity: int
    cost: SequenceCost
    exchange: Exchange = "ulysses"

    @property
    def degrees(self) -> list[int]:
        """Degrees that a group may have, the largest first."""
        every = [2**power for power in range(self.ranks.bit_length() - 1, -1, -1)]
        return [degree for degree in every if self.cost.legal(degree, self.exchange)]

    def rates(self, degree: int) -> tuple[float, float, float]:
        """Seconds a squared token, a token, and a pass of a group of this degree."""
        cost = self.cost
        bandwidth = cost.bandwidth(range(degree))  # groups are aligned, so this is the widest
        fixed = cost.sums_s(0.0, 0.0, degree, bandwidth, self.exchange)
        token = cost.linear_s / degree
        token += cost.exchange_bytes(1.0, degree, self.exchange) / bandwidth
        return cost.quadratic_s / degree, token, fixed

    def seconds(self, degree: int, lengths: np.ndarray) -> float:
        """Of one group with these sequences; an unused one takes nothing."""
        if not len(lengths):
            return 0.0
        square, token, fixed = self.rates(degree)
        return float(square * (lengths * lengths).sum() + token * lengths.sum() + fixed)


def homogeneous(lengths: Sequence[int], pool: RankPool, degree: int) -> Groups:
    """All groups of one degree, which must be legal."""
    return _assigned(lengths, pool, (degree,) * (pool.ranks // degree))


def searched(lengths: Sequence[int], pool: RankPool, *, thorough: bool = True) -> Groups:
    """The best of longest processing time first for many ways to cut the ranks.

    Args:
        lengths: of the sequences.
        pool: the ranks.
        thorough: with groups of different degrees; else of one degree alone.
    """
    cuts: list[tuple[int, ...]] = [(d,) * (pool.ranks // d) for d in pool.degrees]
    if thorough:
        cuts += itertools.islice(_cuts(pool.ranks, tuple(pool.degrees)), _MOST_CUTS)
    return min((_assigned(lengths, pool, cut) for cut in cuts), key=lambda found: found.seconds)


def _cuts(ranks: int, degrees: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every falling list of degrees that add up to the ranks."""
    if not ranks:
        yield ()
    for at, degree in enumerate(degrees):
        if degree <= ranks:
            for rest in _cuts(ranks - degree, degrees[at:]):
                yield (degree, *rest)


def _assigned(lengths: Sequence[int], pool: RankPool, cut: tuple[int, ...]) -> Groups:
    """Longest first, each to the group that then ends first and has room."""
    rates = {degree: pool.rates(degree) for degree in set(cut)}
    squares, tokens, ends = (list(x) for x in zip(*(rates[d] for d in cut), strict=True))
    room = [degree * pool.capacity for degree in cut]
    mine: list[list[int]] = [[] for _ in cut]
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        length = lengths[number]
        end, at = math.inf, -1
        for group, left in enumerate(room):
            if left >= length:
                after = ends[group] + length * (squares[group] * length + tokens[group])
                if after < end:
                    end, at = after, group
        if at < 0:
            return Groups(math.inf)
        ends[at] = end
        room[at] -= length
        mine[at].append(number)
    groups = tuple((d, tuple(x)) for d, x in zip(cut, mine, strict=True) if x)
    return Groups(max(end for end, x in zip(ends, mine, strict=True) if x), groups)


def solved(
    lengths: Sequence[int], pool: RankPool, *, buckets: int, limit_s: float, known: Groups
) -> Groups:
    """The integer program; ``known`` where it finds nothing faster in time.

    Args:
        lengths: of the sequences.
        pool: the ranks.
        buckets: most buckets, Q.
        limit_s: s that the solver may take.
        known: a plan that exists, which bounds the search.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    chosen = bucketed(lengths, buckets)
    longest = np.array([max(lengths[n] for n in bucket) for bucket in chosen], dtype=np.float64)
    count = np.array([len(bucket) for bucket in chosen], dtype=np.float64)
    groups = [d for d in pool.degrees for _ in range(pool.ranks // d)]
    kinds, num = len(chosen), len(groups)
    size = num * kinds + num + 1  # x, m, t
    unit = known.seconds if math.isfinite(known.seconds) and known.seconds > 0 else 1.0
    rows: list[tuple[dict[int, float], float, float]] = []
    for g, degree in enumerate(groups):
        square, token, fixed = pool.rates(degree)
        cells = range(g * kinds, (g + 1) * kinds)
        each = longest * (square * longest + token) / unit
        row = dict(zip(cells, each.tolist(), strict=True))
        rows.append((row | {num * kinds + g: fixed / unit, size - 1: -1.0}, -np.inf, 0.0))
        held = dict(zip(cells, (longest / pool.capacity).tolist(), strict=True))
        rows.append((held | {num * kinds + g: -float(degree)}, -np.inf, 0.0))
        if g and groups[g - 1] == degree:
            rows.append(({num * kinds + g - 1: 1.0, num * kinds + g: -1.0}, 0.0, np.inf))
    for q in range(kinds):
        rows.append(({g * kinds + q: 1.0 for g in range(num)}, count[q], count[q]))
    used = {num * kinds + g: float(degree) for g, degree in enumerate(groups)}
    rows.append((used, 0.0, float(pool.ranks)))
    entries = [(i, j, value) for i, (row, _, _) in enumerate(rows) for j, value in row.items()]
    line, column, value = zip(*entries, strict=True)
    matrix = coo_array((value, (line, column)), shape=(len(rows), size)).tocsr()
    upper = np.concatenate([np.tile(count, num), np.ones(num), [1.0 if known.groups else np.inf]])
    objective = np.zeros(size)
    objective[-1] = 1.0
    whole = np.ones(size, dtype=np.int64)
    whole[-1] = 0
    result = milp(
        objective,
        constraints=LinearConstraint(
            matrix, np.array([low for _, low, _ in rows]), np.array([high for _, _, high in rows])
        ),
        bounds=Bounds(np.zeros(size), upper),
        integrality=whole,
        options={"time_limit": limit_s, "mip_rel_gap": 1e-3},
    )
    # Infeasible: with bucketed lengths nothing is as fast as what is known.
    proven = result.status in (0, 2)
    if result.x is None:
        return known._replace(proven=proven)
    x = np.rint(result.x[: num * kinds]).astype(np.int64).reshape(num, kinds)
    left = [list(bucket) for bucket in chosen]
    made = []
    for g, degree in enumerate(groups):
        mine = [left[q].pop(0) for q in range(kinds) for _ in range(x[g, q])]
        if mine:
            made.append((degree, tuple(mine)))
    sizes = np.asarray(lengths, dtype=np.float64)
    seconds = max(pool.seconds(degree, sizes[list(mine)]) for degree, mine in made)
    if seconds >= known.seconds:
        return known._replace(proven=proven)
    return Groups(seconds, tuple(made), proven)
