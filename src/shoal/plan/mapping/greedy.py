"""Buffers by the time that they save for each byte and slot that they take, as a compiler does it.

A candidate is a run of uses of one buffer, brought or written at the first and kept to the last.
They are tried from the best down; one that finds no room may take that of cheaper ones, if the
program is faster with it than with them.

Source: the memory-space assignment of XLA, as Mandhane et al., Optimizing Memory Mapping Using
Deep Reinforcement Learning, 2023, describe the baseline of production.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.plan.mapping.layout import COPY, DROP, NO_COPY, Mapping
from shoal.plan.mapping.native import FAST, mapping_of, replayer
from shoal.plan.mapping.program import Compiled, MappingProgram, TierSpec

_Replay = Callable[[np.ndarray], tuple[np.ndarray, int]]


@part
class GreedyMapper:
    """Greedy by saved time per byte and slot, with retries that evict; fast and deterministic.

    Args:
        retries: largest number of cheaper candidates that one may evict, one after another.
    """

    retries: Annotated[int, Ge(0), Le(64)] = 4

    def map(self, program: MappingProgram, tiers: TierSpec, *, seed: int = 0) -> Mapping:
        """Place candidates from the best down."""
        compiled = Compiled(program, tiers)
        return mapping_of(compiled, greedy_actions(compiled, self.retries), "greedy")


@dataclass(frozen=True)
class _Candidate:
    """Decisions in fast memory and how they get there: [(decision, action)]."""

    wants: tuple[tuple[int, int], ...]
    start: int
    end: int
    saves: float
    density: float


def greedy_actions(compiled: Compiled, retries: int, replay: _Replay | None = None) -> np.ndarray:
    """Actions [D] of the greedy mapper.

    Args:
        compiled: program and memories.
        retries: evictions that a candidate may try.
        replay: what plays; the fastest that there is, if not given.
    """
    play = replay or replayer(compiled)
    candidates = _candidates(compiled)
    # From nothing, and from what comes of first come, first served, which wastes less of the link
    # where there is room for much.
    starts = (np.full(compiled.decisions, want, np.int8) for want in (DROP, FAST))
    results = [_placed(play, candidates, *play(start), retries) for start in starts]
    return min(results, key=lambda one: one[1])[0]


def _placed(
    play: _Replay, candidates: list[_Candidate], actions: np.ndarray, ticks: int, retries: int
) -> tuple[np.ndarray, int]:
    """Actions and ticks with all candidates that help, the densest first.

    Twice through the list: first those that leave all others where they are, then whatever
    makes the program faster.
    """
    stays: dict[int, _Candidate] = {}
    for strict in (True, False):
        for one in candidates:
            # A longer stay takes over from shorter ones of the same buffer.
            out = [stays[k] for k, _ in one.wants if k in stays]
            rivals = sorted(
                {c for c in stays.values() if c.start <= one.end and c.end >= one.start} - {*out},
                key=lambda c: (c.saves, c.start, c.wants),
            )
            for rival in (None, *rivals[:retries]):
                out += [rival] if rival is not None else []
                wanted = actions.copy()
                for k in (k for gone in out for k, _ in gone.wants):
                    wanted[k] = DROP
                for k, action in one.wants:
                    wanted[k] = action
                played, total = play(wanted)
                if total < ticks and not (strict and np.any(played != wanted)):
                    actions, ticks = played, total
                    stays.update((k, one) for k, _ in one.wants)
                    # What finds no room any more has gone to slow memory.
                    stays = {k: c for k, c in stays.items() if actions[k] != DROP}
                    break
    return actions, ticks


def _candidates(compiled: Compiled) -> list[_Candidate]:
    """All runs of uses, the densest first."""
    c = compiled
    memory = np.zeros(c.slots, np.int64)
    np.add.at(memory, c.slot, c.slow)
    # What an access saves by itself: no more than what its instruction waits for memory.
    alone = np.minimum(c.slow - c.fast, np.maximum(0, memory - c.compute)[c.slot]).tolist()
    slot, write = c.slot.tolist(), c.write.tolist()
    candidates: list[_Candidate] = []
    for b in range(len(c.names)):
        uses = np.flatnonzero(c.buffer == b).tolist()
        size = int(c.size[b])
        if size > c.room:
            continue
        for i, first in enumerate(uses):
            saves = 0.0
            for j in range(i, len(uses)):
                last = uses[j]
                saves += alone[last]
                if write[first]:
                    whole = j == len(uses) - 1 and not c.output[b]
                    begin, action = slot[first], NO_COPY if whole else COPY
                    if action == COPY and j == i and not c.output[b]:
                        continue
                else:
                    # The copy takes a slot before, at least.
                    begin, action = max(0, slot[first] - 1), COPY
                wants = ((first, action), *((k, NO_COPY) for k in uses[i + 1 : j + 1]))
                length = slot[last] - begin + 1
                if saves > 0:
                    candidates.append(
                        _Candidate(wants, begin, slot[last], saves, saves / (size * length))
                    )
    return sorted(candidates, key=lambda one: (-one.density, one.start, one.wants))
