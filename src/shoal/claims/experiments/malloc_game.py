"""[134] MallocGame: does an agent that plans map memory better than a compiler's heuristic?

Eight programs, each with two sizes of fast memory, an eighth and a quarter of all bytes that the
program touches: five small models traced operator by operator, two levels of Strassen's scheme, and
two random programs. The heuristic places candidates by saved time per byte and slot, evicts, and
asks the model of time about every step; the hybrid anneals, and learns each program's game from
the better of the two. Small random programs are solved exactly. Two mappings of a real model run in
two real memories, the slow one held to its rate. The A/A run is the heuristic again.

Source: Mandhane et al., Optimizing Memory Mapping Using Deep Reinforcement Learning, 2023.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Le
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.errors import PlanError
from shoal.core.native import compiler
from shoal.core.parts import part
from shoal.memory.mapping import MAPPERS
from shoal.plan.mapping.layout import Mapping, verify
from shoal.plan.mapping.program import Compiled, MappingProgram, TierSpec
from shoal.plan.mapping.samples import random_program

if TYPE_CHECKING:
    from shoal.memory.mapping.trace import TracedProgram

__all__ = ["MallocGameClaim"]

_SHARES = (8, 4)
_SMALL_STEPS = 8
_SMALL_DECISIONS = 25
_SLOW_BANDWIDTH = 50e6


@part
class MallocGameClaim(BaseClaim):
    """Modelled time of the hybrid mapper against greedy, against the optimum, and a real run.

    Args:
        rounds: of playing and learning of the hybrid on each program.
        small: programs that are solved exactly.
        pairs: runs of each of two mappings of a real model.
    """

    rounds: Annotated[int, Ge(1), Le(1000)] = 10
    small: Annotated[int, Ge(1), Le(1000)] = 10
    pairs: Annotated[int, Ge(1), Le(1000)] = 15

    rows: ClassVar[tuple[int, ...]] = (134,)

    def refuses(self, context: ExperimentContext) -> str | None:
        """The search needs a compiler, the networks torch."""
        if compiler() is None:
            return "no C++ compiler for the search"
        if importlib.util.find_spec("torch") is None:
            return "no torch; install shoal-ml[run]"
        return None

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tiny products; more threads only wait for each other
        try:
            return self._run(context, quick, as_baseline)
        finally:
            torch.set_num_threads(threads)

    def _run(self, context: ExperimentContext, quick: bool, as_baseline: bool) -> ClaimSamples:
        rounds = 2 if quick else self.rounds
        cases = context.remember("cases", lambda: _cases(quick))
        gains: list[float] = []
        rows: list[JsonValue] = []
        for index, (program, tiers) in enumerate(cases):
            context.progress(f"mapping {program.name}", 0.75 * index / len(cases))
            greedy = context.remember(
                f"greedy {index}", functools.partial(_map, "greedy", program, tiers)
            )
            result = greedy if as_baseline else _hybrid(program, tiers, rounds, context.seed)
            gains.append(greedy.ticks / result.ticks - 1.0)
            rows.append(_row(result, greedy, quick or as_baseline, context.seed))
        gaps = self._exact(context, rounds, quick, as_baseline)
        metrics = {
            "mean_gain": PairedSamples(method=tuple(gains)),
            "worst_gain": PairedSamples(method=tuple(gains)),
            "best_gain": PairedSamples(method=tuple(gains)),
            "over_optimum": PairedSamples(method=gaps),
        }
        details: dict[str, JsonValue] = {"programs": rows}
        if quick:
            return ClaimSamples(metrics=metrics, details=details)
        context.progress("running two mappings", 0.9)
        metrics["executed_speedup"] = self._executed(context, as_baseline, details)
        return ClaimSamples(metrics=metrics, details=details)

    def _exact(
        self, context: ExperimentContext, rounds: int, quick: bool, as_baseline: bool
    ) -> tuple[float, ...]:
        """How far above the optimum, of programs with few decisions."""
        gaps = []
        count = 4 if quick else self.small
        for seed, (program, tiers) in enumerate(_small(count)):
            context.progress(f"the optimum of {program.name}", 0.75 + 0.15 * seed / count)
            best = context.remember(f"milp {seed}", functools.partial(_map, "milp", program, tiers))
            result = (
                _map("greedy", program, tiers)
                if as_baseline
                else _hybrid(program, tiers, min(rounds, 4), context.seed)
            )
            gaps.append(result.ticks / best.ticks - 1.0)
        return tuple(gaps)

    def _executed(
        self, context: ExperimentContext, as_baseline: bool, details: dict[str, JsonValue]
    ) -> PairedSamples:
        """Seconds of a model in two real memories, by hybrid and by greedy, turn by turn."""
        from shoal.claims.lab.mapping_executor import execute

        traced: TracedProgram = context.remember("executed", _executed_model)
        tiers = _memories(traced.program, 8, slow_bandwidth=_SLOW_BANDWIDTH)
        greedy = _map("greedy", traced.program, tiers)
        result = (
            greedy if as_baseline else _hybrid(traced.program, tiers, self.rounds, context.seed)
        )
        taken: tuple[list[float], list[float]] = ([], [])
        for pair in range(self.pairs + 1):
            # Which goes first alternates; the first round warms up.
            for way in (0, 1) if pair % 2 else (1, 0):
                seconds = execute(traced, (result, greedy)[way]).seconds
                if pair:
                    taken[way].append(seconds)
        details["executed"] = {
            "modelled_s": {"method": result.seconds, "greedy": greedy.seconds},
            "median_s": {
                "method": statistics.median(taken[0]),
                "greedy": statistics.median(taken[1]),
            },
        }
        return PairedSamples(method=tuple(taken[0]), baseline=tuple(taken[1]))


def _map(mapper: str, program: MappingProgram, tiers: TierSpec, **options: Any) -> Mapping:
    """A mapping whose promises were looked at."""
    mapping: Mapping = MAPPERS.build({"name": mapper, **options}).map(program, tiers)
    if verify(mapping) != mapping.ticks:
        raise PlanError(f"{mapper} on {program.name}: {mapping.ticks} ticks, but {verify(mapping)}")
    return mapping


def _hybrid(
    program: MappingProgram, tiers: TierSpec, rounds: int, seed: int, **options: Any
) -> Mapping:
    mapping: Mapping = MAPPERS.build({"name": "hybrid", "rounds": rounds, **options}).map(
        program, tiers, seed=seed
    )
    if verify(mapping) != mapping.ticks:
        raise PlanError(f"hybrid on {program.name}: {mapping.ticks} ticks, but {verify(mapping)}")
    return mapping


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


def _executed_model() -> TracedProgram:
    from shoal.memory.mapping.samples import traced_sample

    return traced_sample("vit")


def _row(found: Mapping, greedy: Mapping, alone: bool, seed: int) -> JsonValue:
    """What is reported of a program: times as shares of that from slow memory alone."""
    c = found.compiled

    def share(one: Mapping) -> float:
        return one.ticks / c.all_slow

    row: dict[str, JsonValue] = {
        "program": c.program.name,
        "instructions": c.slots,
        "decisions": c.decisions,
        "fast_bytes": c.tiers.fast_bytes,
        "greedy": share(greedy),
        "hybrid": share(found),
        "all_fast": c.all_fast / c.all_slow,
    }
    if not alone:
        from shoal.memory.mapping.hybrid import HOT, HybridMapper

        program, tiers = c.program, c.tiers
        # What the hybrid has before its agent plays.
        row["anneal"] = share(_map("anneal", program, tiers, rounds=HybridMapper.changes, hot=HOT))
        # The same games from greedy's mapping, with networks that never learn.
        row["untrained"] = share(_hybrid(program, tiers, 2, seed, updates=0, changes=0))
    return row
