"""FlexSP: groups of different degrees for every micro-batch, by an integer program.

A batch that one pass cannot hold is cut in M micro-batches of similar lengths; for each M from
the fewest that hold it to ten more, the groups are searched, and the best M is solved by
:mod:`~shoal.plan.balance.sequences.groups` within what is left of the time. Groups are powers of
two and aligned, big ones first, so that a small one spans no slow link.

Source: Wang et al., FlexSP, 2024, sections 4.1 and 4.2.

Differs: the solver gets the best two numbers of micro-batches, not all eleven, so that one limit
holds for the whole batch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from annotated_types import Ge

from shoal.core.errors import PlanError, require
from shoal.core.parts import part
from shoal.cost.training.sequences import SequenceCost
from shoal.ir import Estimate, Machine, Work
from shoal.plan.balance.sequences.assignment import (
    Assignment,
    MicroStep,
    lengths_of,
)
from shoal.plan.balance.sequences.estimated import assigned_estimate
from shoal.plan.balance.sequences.groups import Groups, RankPool, homogeneous, searched, solved

# Numbers of micro-batches beyond the fewest, and how many of them are searched thoroughly.
_MORE, _SEARCHED = 10, 3
# s below which the solver is not asked.
_LEAST_S = 0.01


class FlexSPSolution(NamedTuple):
    """A whole batch.

    Args:
        seconds: of all micro-batches, one after another.
        batches: numbers of the sequences of each micro-batch, and its groups by places in them.
    """

    seconds: float
    batches: tuple[tuple[tuple[int, ...], Groups], ...]


@part
class FlexSP:
    """Groups of powers of two, by an integer program: choose it where links are fast in a node.

    If the number of ranks is not a power of two, the next lower power is used; the other ranks only
    sum gradients.

    Args:
        capacity_tokens: largest number of tokens of a rank in a pass, C.
        buckets: number of distinct lengths in the integer program, Q.
        limit_s: time limit of the solver for a batch in s; 0 to not use the solver.
    """

    capacity_tokens: Annotated[int, Ge(1)] = 8192
    buckets: Annotated[int, Ge(1)] = 16
    limit_s: Annotated[float, Ge(0)] = 5.0

    def assign(self, lengths: Sequence[int], ranks: int, cost: SequenceCost) -> Assignment:
        require(ranks >= 1, "assigner.flexsp: ranks", ranks, expected="at least 1", error=PlanError)
        pool = RankPool(1 << (ranks.bit_length() - 1), self.capacity_tokens, cost)
        result = lengths_of(
            lengths, ranks, self.capacity_tokens, pool.degrees[0], where="assigner.flexsp"
        )
        solution = self.solve(result.tolist(), pool)
        steps = []
        for members, groups in solution.batches:
            first = 0
            for degree, mine in sorted(groups.groups, key=lambda group: -group[0]):
                chosen = tuple(members[number] for number in mine)
                steps.append(MicroStep(chosen, tuple(range(first, first + degree))))
                first += degree
        return Assignment(tuple(result.tolist()), ranks, tuple(steps), "ulysses")

    def solve(self, lengths: Sequence[int], pool: RankPool) -> FlexSPSolution:
        """Micro-batches and their groups; never slower than one degree for all."""
        begin = time.perf_counter()
        # One degree for each micro-batch says which cuts are worth a search.
        tried = _tried(_cuts(lengths, pool), lengths, pool, thorough=False)[:_SEARCHED]
        tried += _tried([_members(one) for one in tried], lengths, pool, thorough=True)
        require(
            bool(tried),
            "assigner.flexsp: micro-batches",
            len(lengths),
            expected="sequences that groups of powers of two hold in some cut",
            hint="raise capacity_tokens",
            error=PlanError,
        )
        tried.sort(key=lambda solution: solution.seconds)
        chosen = tried[:1] + [x for x in tried if _members(x) != _members(tried[0])][:1]
        still = sum(len(solution.batches) for solution in chosen)
        better = []
        for solution in chosen:
            batches = []
            for members, known in solution.batches:
                left = self.limit_s - (time.perf_counter() - begin)
                if left > _LEAST_S:
                    here = [lengths[n] for n in members]
                    limit_s = left / still
                    known = solved(here, pool, buckets=self.buckets, limit_s=limit_s, known=known)
                still -= 1
                batches.append((members, known))
            better.append(FlexSPSolution(sum(g.seconds for _, g in batches), tuple(batches)))
        return min(better, key=lambda solution: solution.seconds)

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        return assigned_estimate(dataclasses.replace(self, limit_s=0.0), work, machine)


def best_homogeneous(lengths: Sequence[int], pool: RankPool) -> tuple[int, float]:
    """The single degree that takes the least time for the batch, and its seconds."""
    best = (0, float("inf"))
    for degree in pool.degrees:
        for cut in _cuts(lengths, pool):
            seconds = sum(
                homogeneous([lengths[n] for n in members], pool, degree).seconds for members in cut
            )
            if seconds < best[1]:
                best = (degree, seconds)
    return best


def _cuts(lengths: Sequence[int], pool: RankPool) -> list[list[tuple[int, ...]]]:
    """The batch in about M micro-batches of as many tokens and of similar lengths.

    None has more than all ranks hold, so one group of all of them is always a way.
    """
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    total, most = sum(lengths), pool.ranks * pool.capacity
    fewest = -(-total // most)
    cuts: list[list[tuple[int, ...]]] = []
    for number in range(fewest, min(fewest + _MORE, len(lengths)) + 1):
        limit = min(most, -(-total // number))
        cut: list[list[int]] = []
        tokens = limit
        for one in order:
            if tokens + lengths[one] > limit:
                cut.append([])
                tokens = 0
            cut[-1].append(one)
            tokens += lengths[one]
        if (chosen := [tuple(members) for members in cut]) not in cuts:
            cuts.append(chosen)
    return cuts


def _members(solution: FlexSPSolution) -> list[tuple[int, ...]]:
    return [members for members, _ in solution.batches]


def _tried(
    cuts: list[list[tuple[int, ...]]], lengths: Sequence[int], pool: RankPool, *, thorough: bool
) -> list[FlexSPSolution]:
    """Cuts with groups for each of their micro-batches, where all fit; the fastest first."""
    results = []
    for cut in cuts:
        batches = []
        for members in cut:
            groups = searched([lengths[n] for n in members], pool, thorough=thorough)
            batches.append((members, groups))
        if all(groups.groups for _, groups in batches):
            results.append(FlexSPSolution(sum(g.seconds for _, g in batches), tuple(batches)))
    return sorted(results, key=lambda solution: solution.seconds)
