"""[134] MallocGame: does an agent that plans map memory better than a compiler's heuristic?

Eight programs (five traced models, two levels of Strassen's scheme, two random ones), fast memories
of an eighth and a quarter of their bytes. The heuristic places by saved time per byte and slot,
evicts, and asks the model of time about every step; the hybrid anneals, and learns from the better
of both. Small programs are solved exactly, two mappings run in real memories. The A/A run is the
heuristic again.

Source: Mandhane et al., Optimizing Memory Mapping Using Deep Reinforcement Learning, 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.errors import PlanError
from shoal.core.parts import part
from shoal.kernel.threads import torch_threads
from shoal.memory.mapping import MAPPERS
from shoal.plan.mapping.layout import Mapping, verify
from shoal.plan.mapping.program import Compiled, MappingProgram, TierSpec
from shoal.plan.mapping.samples import random_program

if TYPE_CHECKING:
    from shoal.memory.mapping.trace import TracedProgram

_SHARES = (8, 4)
_SMALL_STEPS = 8
_SMALL_DECISIONS = 25
_SLOW_BANDWIDTH = 50e6


@part
class MallocGameClaim(BaseClaim, row=134, needs=("c++", "torch")):
    """Modelled time of the hybrid mapper against greedy, against the optimum, and a real run.

    Args:
        rounds: rounds of playing and learning of the hybrid on each program.
        small: programs that are solved exactly.
        pairs: runs of each of two mappings of a real model.
    """

    rounds: Annotated[int, Ge(1), Le(1000)] = 10
    small: Annotated[int, Ge(1), Le(1000)] = 10
    pairs: Annotated[int, Ge(1), Le(1000)] = 15

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        with torch_threads(1):  # tiny products; more threads only wait for each other
            self._map_all(run)

    def _map_all(self, run: ClaimRun) -> None:
        rounds = 2 if run.quick else self.rounds
        cases = run.remember("cases", lambda: _cases(run.quick))
        gains: list[float] = []
        rows = run.details["programs"] = []
        for index, (program, tiers) in enumerate(cases):
            run.progress(f"mapping {program.name}", 0.75 * index / len(cases))
            greedy = run.remember(
                f"greedy {index}", functools.partial(_map, "greedy", program, tiers)
            )
            result = greedy if run.as_baseline else _hybrid(program, tiers, rounds, run.seed)
            gains.append(greedy.ticks / result.ticks - 1.0)
            rows.append(_row(result, greedy, run.quick or run.as_baseline, run.seed))
        for metric in ("mean_gain", "worst_gain", "best_gain"):
            run.put(metric, gains)
        self._exact(run, rounds)
        if not run.quick:
            run.progress("running two mappings", 0.9)
            self._execute(run)

    def _exact(self, run: ClaimRun, rounds: int) -> None:
        """How far above the optimum, of programs with few decisions."""
        gaps = []
        count = 4 if run.quick else self.small
        for seed, (program, tiers) in enumerate(_small(count)):
            run.progress(f"the optimum of {program.name}", 0.75 + 0.15 * seed / count)
            best = run.remember(f"milp {seed}", functools.partial(_map, "milp", program, tiers))
            if run.as_baseline:
                result = _map("greedy", program, tiers)
            else:
                result = _hybrid(program, tiers, min(rounds, 4), run.seed)
            gaps.append(result.ticks / best.ticks - 1.0)
        run.put("over_optimum", gaps)

    def _execute(self, run: ClaimRun) -> None:
        """Seconds of a model in two real memories, by hybrid and by greedy, turn by turn."""
        from shoal.claims.lab.mapping_executor import execute
        from shoal.memory.mapping.samples import traced_sample

        traced: TracedProgram = run.remember("executed", lambda: traced_sample("vit"))
        tiers = _memories(traced.program, 8, slow_bandwidth=_SLOW_BANDWIDTH)
        greedy = _map("greedy", traced.program, tiers)
        method = greedy
        if not run.as_baseline:
            method = _hybrid(traced.program, tiers, self.rounds, run.seed)
        ways = {"method": method, "greedy": greedy}
        arms = {name: lambda one=one: execute(traced, one).seconds for name, one in ways.items()}
        taken = run.turns(arms, self.pairs, warmup=1)
        run.put("executed_speedup", taken["method"], taken["greedy"])


def _map(
    mapper: str, program: MappingProgram, tiers: TierSpec, seed: int | None = None, **options: Any
) -> Mapping:
    """A mapping whose promises were looked at."""
    part = MAPPERS.build({"name": mapper, **options})
    mapping: Mapping = (
        part.map(program, tiers) if seed is None else part.map(program, tiers, seed=seed)
    )
    if verify(mapping) != mapping.ticks:
        raise PlanError(f"{mapper} on {program.name}: {mapping.ticks} ticks, but {verify(mapping)}")
    return mapping


def _hybrid(
    program: MappingProgram, tiers: TierSpec, rounds: int, seed: int, **options: Any
) -> Mapping:
    return _map("hybrid", program, tiers, seed, rounds=rounds, **options)


def _memories(program: MappingProgram, share: int, **changes: float) -> TierSpec:
    """Fast memory of a share of all bytes that the program touches."""
    total = sum(buffer.nbytes for buffer in program.buffers if not buffer.alias_of)
    return TierSpec.model_validate({"fast_bytes": max(256, total // share), **changes})


def _cases(quick: bool) -> list[tuple[MappingProgram, TierSpec]]:
    """Programs and memories; the quick run has the random ones alone."""
    from shoal.memory.mapping.samples import samples

    if quick:
        programs = (random_program(60, seed=1), random_program(100, seed=2))
        return [(program, _memories(program, 4)) for program in programs]
    return [(program, _memories(program, share)) for program in samples() for share in _SHARES]


def _small(count: int) -> Iterator[tuple[MappingProgram, TierSpec]]:
    """Random programs of at most 25 decisions."""
    result, seed = 0, 0
    while result < count:
        program = random_program(_SMALL_STEPS, seed=seed)
        tiers = _memories(program, 4)
        seed += 1
        if Compiled(program, tiers).decisions <= _SMALL_DECISIONS:
            result += 1
            yield program, tiers


def _row(found: Mapping, greedy: Mapping, alone: bool, seed: int) -> dict[str, Any]:
    """What is reported of a program: times as shares of that from slow memory alone."""
    c = found.compiled

    def share(one: Mapping) -> float:
        return one.ticks / c.all_slow

    row: dict[str, Any] = {
        "program": c.program.name,
        "greedy": share(greedy),
        "hybrid": share(found),
    }
    if not alone:
        from shoal.memory.mapping.hybrid import HOT, HybridMapper

        program, tiers = c.program, c.tiers
        # What the hybrid has before its agent plays.
        row["anneal"] = share(_map("anneal", program, tiers, rounds=HybridMapper.changes, hot=HOT))
        # The same games from greedy's mapping, with networks that never learn.
        row["untrained"] = share(_hybrid(program, tiers, 2, seed, updates=0, changes=0))
    return row
