"""Stages and strategies of all layers for one number of stages and one micro-batch.

Inside a stage the dynamic programme chooses a strategy for each layer. The stages begin cut so
that their memory is balanced, and so that their time is; then layers move from stage to
stage, one at a time, as long as the step becomes shorter and every stage still fits.

Source: Wang et al., Improving Automatic Parallel Training via Balanced Memory Workload
Optimization (Galvatron-BMW), 2024, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.cost.training.layer_plan import (
    LayerPlan,
    StageCost,
    end_of,
    in_flight,
    seconds_of,
    stage_cost,
)
from shoal.cost.training.layers import LayerCost, ModelLayer, Strategy
from shoal.cost.training.layerwise import LayerPricer
from shoal.cost.training.memory import ALLOCATOR_SLACK, RUNTIME_BYTES
from shoal.plan.partition import partition
from shoal.plan.strategy.layer_dp import cheapest_chain

_MIB = 2.0**20
_MOST_MOVES = 64


class StageSolution(NamedTuple):
    """The result for one number of stages and one micro-batch size.

    Args:
        plan: stages and strategies; None where no stage layout fits.
        seconds: s of a step by the closed form; infinite if nothing fits.
        stages: costs of the stages.
        missing_bytes: where nothing fits, by how much the fullest stage misses.
        stage: its number.
    """

    plan: LayerPlan | None
    seconds: float
    stages: tuple[StageCost, ...] = ()
    missing_bytes: float = 0.0
    stage: int = 0


class _Solved(NamedTuple):
    strategies: tuple[Strategy, ...]
    cost: StageCost | None
    missing: float


def undominated(costs: Sequence[tuple[Strategy, LayerCost]], held: int) -> list[Strategy]:
    """Strategies that no other of the same layout beats in time, once and memory at once."""
    kept: list[Strategy] = []
    seen: dict[tuple[int, int, int], list[tuple[float, float, float, float]]] = {}
    rows = sorted(
        (
            (c.micro_s, c.once_s, c.resident_bytes + held * c.held_bytes, c.transient_bytes, s)
            for s, c in costs
        ),
        key=lambda row: row[:4],
    )
    for *numbers, strategy in rows:
        own = (numbers[0], numbers[1], numbers[2], numbers[3])
        others = seen.setdefault(strategy.layout, [])
        if not any(all(a <= b for a, b in zip(o, own, strict=True)) for o in others):
            others.append(own)
            kept.append(strategy)
    return kept


@dataclass
class StageSearch:
    """The search for one number of stages and one micro-batch.

    Args:
        pricer: of the layers.
        layers: of the model.
        strategies: that every layer may take.
        sequences: of a micro-batch, on all ranks of a stage.
        microbatches: of a step.
        usable: bytes that a rank may fill.
        units: in how many units memory is counted, beyond the least that each layer needs.
        ends: how embedding and output layer run; as the blocks next to them, if not given.
    """

    pricer: LayerPricer
    layers: Sequence[ModelLayer]
    strategies: Sequence[Strategy]
    pp: int
    sequences: int
    microbatches: int
    usable: float
    units: int = 256
    ends: Strategy | None = None
    _memo: dict[tuple[object, ...], _Solved] = field(default_factory=dict)

    def run(self, *, improve: bool = True) -> StageSolution:
        """The best stages and strategies that were found.

        Args:
            improve: move layers between stages; else the balanced cuts alone are tried.
        """
        best = StageSolution(None, math.inf, missing_bytes=math.inf)
        for cut in self._starts():
            result = self._improved(cut) if improve else self.of(cut)
            if result.seconds < best.seconds or (
                best.plan is None and result.missing_bytes < best.missing_bytes
            ):
                best = result
        return best

    def of(self, sizes: Sequence[int]) -> StageSolution:
        """The best strategies for given stages."""
        stages, cuts, first = [], [], 0
        strategies: list[Strategy] = []
        for number, size in enumerate(sizes):
            cut = range(first, first + size)
            solved = self._solve(number, cut)
            if solved.cost is None:
                return StageSolution(None, math.inf, (), solved.missing, number)
            stages.append(solved.cost)
            strategies += solved.strategies
            cuts.append(cut)
            first += size
        plan = LayerPlan(
            tuple(cuts), tuple(strategies), self.sequences, self.microbatches, self.ends
        )
        return StageSolution(plan, seconds_of(stages, self.microbatches), tuple(stages))

    # Stages ------------------------------------------------------------------------------

    def _starts(self) -> Iterator[tuple[int, ...]]:
        """Cuts of balanced memory, and of balanced time."""
        if self.pp == 1:
            yield (len(self.layers),)
            return
        count = len(self.layers)
        cheap = [self._cheapest(at) for at in range(count)]
        weights = (
            [cost.resident_bytes + self.pp / 2 * cost.held_bytes for cost in cheap],
            [cost.micro_s for cost in cheap],
        )
        seen = set()
        for costs in weights:
            sizes = tuple(len(cut) for cut in partition(costs, self.pp))
            if sizes not in seen:
                seen.add(sizes)
                yield sizes

    def _cheapest(self, at: int) -> LayerCost:
        end = {0: "embed", len(self.layers) - 1: "head"}.get(at, "") if not self.ends else ""
        costs = [
            self.pricer.layer(self.layers[at], s, self.sequences, self.pp, end)
            for s in self.strategies
        ]
        return min(costs, key=lambda cost: self.microbatches * cost.micro_s + cost.once_s)

    def _improved(self, sizes: tuple[int, ...]) -> StageSolution:
        """Move layers one at a time while that helps: first to fit, then to be faster."""
        best, current = self.of(sizes), sizes
        for _ in range(_MOST_MOVES):
            better = None
            for moved in _moves(current, self._worst(best)):
                result = self.of(moved)
                gain = result.seconds < best.seconds * (1 - 1e-9)
                fitter = best.plan is None and result.missing_bytes < best.missing_bytes
                if gain or fitter:
                    best, better = result, moved
            if better is None:
                break
            current = better
        return best

    def _worst(self, found: StageSolution) -> int:
        """The stage that should lose a layer."""
        if found.plan is None:
            return found.stage
        return max(range(self.pp), key=lambda at: found.stages[at].micro_s)

    # Strategies --------------------------------------------------------------------------

    def _solve(self, stage: int, cut: range) -> _Solved:
        held = in_flight(self.pricer.job.parallel.schedule.name, stage, self.pp, self.microbatches)
        end = end_of(stage, self.pp)
        key = (tuple(self.layers[at].name for at in cut), held, end)
        if key not in self._memo:
            self._memo[key] = self._chosen([self.layers[at] for at in cut], end, held)
        return self._memo[key]

    def _chosen(self, layers: list[ModelLayer], end: str, held: int) -> _Solved:
        """The strategies of one stage's layers."""
        costs = self._table(layers, end)
        kept = sorted({s for row in _distinct(costs) for s in undominated(list(row.items()), held)})
        rows = [[row[s] for s in kept] for row in costs]
        seconds = np.array(
            [[self.microbatches * c.micro_s + c.once_s for c in row] for row in rows]
        )
        change, group = self._changes(layers, kept)
        room = (self.usable - RUNTIME_BYTES[self.pricer.machine.device.kind]) / (
            1 + ALLOCATOR_SLACK
        )
        if self.ends is not None:
            room -= self._enter(seconds, layers, kept, end)
        # Without a limit first: most often everything fits.
        none = np.zeros(seconds.shape, dtype=np.int64)
        free = cheapest_chain(seconds, none, change, 0, group)
        if not free.choice:
            return _Solved((), None, math.inf)
        cost = self._cost(layers, [kept[s] for s in free.choice], end, held)
        if sum(cost.memory_bytes.values()) <= room:
            return _Solved(tuple(kept[s] for s in free.choice), cost, 0.0)
        transient = np.array([[c.transient_bytes for c in row] for row in rows])
        filled = np.array([[c.resident_bytes + held * c.held_bytes for c in row] for row in rows])
        best, missing, chosen = math.inf, math.inf, None
        for limit in reversed(_levels(transient)):
            open_ = np.where(transient <= limit, seconds, np.inf)
            legal = np.isfinite(open_)
            if not legal.any(axis=1).all():
                continue
            # Every layer needs its least; only what goes beyond is counted in units.
            least = np.where(legal, filled, np.inf).min(axis=1)
            left = room - limit - float(least.sum())
            if left < 0:
                missing = min(missing, -left)
                continue
            if cheapest_chain(open_, none, change, 0, group).seconds >= best:
                continue
            unit = max(left / self.units, _MIB / 1024)
            over = np.maximum(0.0, filled - least[:, None]) / unit
            units = np.ceil(np.minimum(over, self.units + 1.0) - 1e-9).astype(np.int64)
            chain = cheapest_chain(open_, units, change, int(left / unit), group)
            if chain.choice and chain.seconds < best:
                best, chosen = chain.seconds, chain.choice
        if chosen is None:
            return _Solved((), None, missing)
        strategies = tuple(kept[s] for s in chosen)
        return _Solved(strategies, self._cost(layers, strategies, end, held), 0.0)

    def _table(self, layers: list[ModelLayer], end: str) -> list[dict[Strategy, LayerCost]]:
        table = []
        end = "" if self.ends is not None else end
        for at, layer in enumerate(layers):
            here = "embed" if at == 0 and end in ("embed", "both") else ""
            if at == len(layers) - 1 and end in ("head", "both"):
                here = "both" if here else "head"
            table.append(
                {
                    s: self.pricer.layer(layer, s, self.sequences, self.pp, here)
                    for s in self.strategies
                }
            )
        return table

    def _changes(
        self, layers: list[ModelLayer], kept: list[Strategy]
    ) -> tuple[npt.NDArray[np.float64], list[int]]:
        """[L - 1, G, G]: seconds of changes of layout in a step, and each strategy's layout."""
        hidden = layers[0].shape.hidden
        layouts = sorted({s.layout for s in kept})
        once = np.array(
            [
                [
                    self.microbatches * self.pricer.change(a, b, hidden, self.sequences, self.pp)
                    for b in layouts
                ]
                for a in layouts
            ]
        )
        group = [layouts.index(s.layout) for s in kept]
        return np.broadcast_to(once, (len(layers) - 1, *once.shape)), group

    def _enter(
        self,
        seconds: npt.NDArray[np.float64],
        layers: list[ModelLayer],
        kept: list[Strategy],
        end: str,
    ) -> float:
        """Add the changes at both ends of a stage to ``seconds``; bytes of what the ends hold."""
        assert self.ends is not None
        hidden = layers[0].shape.hidden
        for at, s in enumerate(kept):
            # A change costs the same both ways: the gradient goes back.
            change = self.pricer.change(self.ends.layout, s.layout, hidden, self.sequences, self.pp)
            seconds[0, at] += self.microbatches * change
            seconds[-1, at] += self.microbatches * change
        own = [
            self.pricer.end(name, self.ends, self.sequences, self.pp)
            for name in ("embed", "head")
            if end in (name, "both")
        ]
        return sum(cost.resident_bytes + cost.transient_bytes for cost in own)

    def _cost(
        self, layers: list[ModelLayer], strategies: Sequence[Strategy], end: str, held: int
    ) -> StageCost:
        return stage_cost(
            self.pricer,
            layers,
            strategies,
            end=end,
            pp=self.pp,
            sequences=self.sequences,
            held=held,
            ends=self.ends,
        )


def _moves(sizes: tuple[int, ...], worst: int) -> Iterator[tuple[int, ...]]:
    """Cuts in which one layer of the worst stage, or any, went to a neighbour or a far stage."""
    for source in sorted(range(len(sizes)), key=lambda at: at != worst):
        if sizes[source] == 1:
            continue
        for target in range(len(sizes)):
            if target != source and (source == worst or abs(target - source) == 1):
                moved = list(sizes)
                moved[source] -= 1
                moved[target] += 1
                yield tuple(moved)


def _distinct(rows: list[dict[Strategy, LayerCost]]) -> list[dict[Strategy, LayerCost]]:
    """One row of each kind of layer."""
    result: dict[int, dict[Strategy, LayerCost]] = {}
    for row in rows:
        result.setdefault(id(next(iter(row.values()))), row)
    return list(result.values())


def _levels(transient: npt.NDArray[np.float64]) -> list[float]:
    """Limits on what is held beside the rest, ascending: at most 32 of those there are."""
    values = np.unique(transient)
    if len(values) > 32:
        values = values[np.linspace(0, len(values) - 1, 32).round().astype(int)]
    return [float(value) for value in values]
