"""Galvatron: each layer has a strategy of its own, chosen under a memory limit.

For every number of stages and every micro-batch, a dynamic programme gives each layer its degrees
of data, tensor and context parallelism, its sharding and whether it is recomputed, and layers
move between stages until they balance. Changes between layers cost what has to travel.

The runtime runs stages of any length and layers that differ in recomputation, in dp, tp and
sharding; embedding and output layer have degrees of their own. A plan whose layers differ in cp,
or differ at all where the model has experts, says that it is planned only; ``runnable`` leaves it
out, and also chooses how the ends of the model run.

Source: Miao et al., Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic
Parallelism, 2023; Wang et al., Improving Automatic Parallel Training via Balanced Memory
Workload Optimization, 2024; Liu et al., Galvatron: Automatic Distributed Training for Large
Transformer Models, 2025.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

from annotated_types import Ge, Gt, Le

from shoal.core.errors import PlanError
from shoal.core.parts import Choice, part, table
from shoal.core.traits import traits
from shoal.cost.price.rates import RankRates
from shoal.cost.shapes import shape_of
from shoal.cost.training.layer_fit import LayerProfile
from shoal.cost.training.layer_plan import LayerPlan, estimate_layers
from shoal.cost.training.layers import ModelLayer, Strategy, layers_of
from shoal.cost.training.layerwise import LayerPricer
from shoal.ir import LayerGroup, Machine, ModelShape, Parallel, TrainJob, TrainPlan, Work
from shoal.plan.composition import excluded_by, work_traits
from shoal.plan.defaults import settled_training
from shoal.plan.experts.moe_auto import ChunkChooser
from shoal.plan.layered import layers_alike
from shoal.plan.strategy.judge import FILL, describe, fits, to_plan
from shoal.plan.strategy.layer_search import StageSearch, StageSolution
from shoal.plan.strategy.search import SearchPlanner
from shoal.plan.strategy.space import candidates, composes, divisors, most_ranks, worlds

# Micro-batches whose least possible time is so much above the best are not searched.
_HOPELESS = 1.3
# So many of the best numbers of stages and micro-batches are searched for better stages.
_IMPROVED = 6
_PLANNED_ONLY = "planned only: this version cannot run these layers with their own degrees: "


class Option(NamedTuple):
    """One searched number of stages and micro-batch.

    Args:
        solution: what the search gave.
        precision: fp32 or bf16.
        sequences: of a micro-batch, on all ranks of a stage.
        pricer: of its layers.
    """

    solution: StageSolution
    precision: str
    pp: int
    sequences: int
    pricer: LayerPricer


@part
class Galvatron:
    """A strategy for each layer, by dynamic programming.

    Args:
        keep: number of plans returned, best first.
        memory_gib: memory budget of a rank in GiB; that of the machine if not given.
        units: number of units into which a stage's memory above its minimum is discretized.
        layouts: number of combinations of parallelism degrees considered for the layers of a stage:
            the fastest ones, and the two that need the least memory.
        runnable: only plans that this version can run.
    """

    keep: Annotated[int, Ge(1), Le(10_000)] = 10
    memory_gib: Annotated[float, Gt(0), Le(1e6)] | None = None
    units: Annotated[int, Ge(16), Le(65536)] = 256
    layouts: Annotated[int, Ge(3), Le(64)] = 6
    runnable: bool = False

    def plan(
        self,
        job: TrainJob,
        machine: Machine,
        *,
        profile: LayerProfile | None = None,
        layers: Sequence[ModelLayer] = (),
    ) -> list[TrainPlan]:
        """See :class:`~shoal.plan.strategy.protocols.Planner`."""
        job = settled_training(job, machine)
        beyond = _beyond(job)
        if beyond:
            plans = SearchPlanner(keep=self.keep).plan(job, machine)
            note = f"all layers run alike: {beyond} is not planned layer by layer"
            changed = {"planner": "galvatron"}
            return [p.model_copy(update={**changed, "notes": (note, *p.notes)}) for p in plans]
        shape = shape_of(job)
        layers = layers or layers_of(shape)
        options, failed = self.search(job, machine, shape, layers, profile=profile)
        if not options:
            return self._nothing_fits(job, machine, failed)
        plans = self._plans(options, job, machine, shape, layers, profile)
        notes = self._rejected(options, failed, job, machine, shape, layers)
        first = plans[0].model_copy(update={"notes": (*plans[0].notes, *notes)})
        return [first, *plans[1:]]

    # Search ------------------------------------------------------------------------------

    def search(
        self,
        job: TrainJob,
        machine: Machine,
        shape: ModelShape,
        layers: Sequence[ModelLayer],
        *,
        profile: LayerProfile | None = None,
        world: int | None = None,
    ) -> tuple[list[Option], list[Option]]:
        """Every number of stages and micro-batch: those that fit, best first, and the others.

        Args:
            job: what it states is kept.
            machine: what there is.
            shape: the model's; its ends are those of the embedding and the output layer.
            layers: the model's blocks.
            profile: what was measured of the layers.
            world: number of ranks; as many as the machine has room for if not given.

        Raises:
            PlanError: no parallelism configuration is valid.
        """
        next(candidates(job, machine, shape=shape), None)  # refuses what is stated wrongly
        results: list[tuple[StageSearch, Option]] = []
        best = math.inf
        for ranks in [world] if world else worlds(job, machine):
            for precision in self._precisions(job, machine):
                one = job.model_copy(update={"precision": precision})
                pricer = LayerPricer(one, machine, shape, profile)
                usable = self._usable(job, machine, ranks)
                for pp, sequences, strategies in self._spaces(one, machine, shape, ranks):
                    search = StageSearch(
                        pricer,
                        layers,
                        strategies,
                        pp,
                        sequences,
                        job.global_batch // sequences,
                        usable,
                        self.units,
                    )
                    option = self._one(search, best, precision)
                    if option is not None:
                        best = min(best, option.solution.seconds)
                        results.append((search, option))
            if results and machine.device.kind == "gpu":
                break
        if not results:
            raise PlanError(
                f"{job.model} on {machine.name}: no parallelism configuration is valid for "
                f"global_batch = "
                f"{job.global_batch}: every dp has to divide it, and tp {shape.num_heads} heads "
                f"and {shape.num_kv_heads} key/value heads; change global_batch"
            )
        options = self._improved(results)
        good = [option for option in options if option.solution.plan is not None]
        bad = [option for option in options if option.solution.plan is None]
        good.sort(key=lambda option: option.solution.seconds)
        bad.sort(key=lambda option: option.solution.missing_bytes)
        return good, bad

    def _improved(self, found: list[tuple[StageSearch, Option]]) -> list[Option]:
        """Move layers between the stages of the most promising ones, and of what hardly misses."""
        found.sort(key=lambda item: (item[1].solution.seconds, item[1].solution.missing_bytes))
        options = []
        for place, (search, option) in enumerate(found):
            if option.pp > 1 and place < _IMPROVED:
                option = self._run(search, option.precision, improve=True)
            options.append(option)
        return options

    def _precisions(self, job: TrainJob, machine: Machine) -> tuple[str, ...]:
        if "precision" in job.model_fields_set:
            return (job.precision,)
        return ("bf16",) if machine.device.kind == "gpu" else ("fp32", "bf16")

    def _usable(self, job: TrainJob, machine: Machine, world: int) -> float:
        """Bytes that a rank may fill."""
        if self.memory_gib is not None:
            return self.memory_gib * 2**30
        rates = RankRates(machine, Parallel(dp=world), job.threads)
        return FILL[machine.device.kind] * rates.capacity_bytes

    def _spaces(
        self, job: TrainJob, machine: Machine, shape: ModelShape, world: int
    ) -> Iterator[tuple[int, int, list[Strategy]]]:
        """Stages, sequences of a micro-batch, and the strategies that layers may take."""
        stated = job.parallel if "parallel" in job.model_fields_set else None
        for pp in divisors(world):
            if pp > shape.num_layers or (stated is not None and pp != stated.pp):
                continue
            every = [
                (dp, tp, cp)
                for dp, tp, cp in self._layouts(job, machine, shape, world // pp)
                if stated is not None or composes(job, Parallel(dp=dp, tp=tp, cp=cp, pp=pp))
            ]
            for sequences in divisors(job.global_batch):
                legal = [
                    layout
                    for layout in every
                    if sequences % layout[0] == 0
                    and job.microbatch in (None, sequences // layout[0])
                ]
                results = [s for layout in legal for s in self._of_layout(job, layout)]
                if results:
                    yield pp, sequences, results

    def _layouts(
        self, job: TrainJob, machine: Machine, shape: ModelShape, ranks: int
    ) -> Iterator[tuple[int, int, int]]:
        if "parallel" in job.model_fields_set:
            yield job.parallel.dp, job.parallel.tp, job.parallel.cp
            return
        inside = machine.devices_per_node if machine.device.kind == "gpu" else most_ranks(machine)
        wide = shape.expert_hidden if shape.num_experts else shape.ffn_hidden
        for tp in divisors(ranks):
            # Sums of tensor parallelism across nodes lose to every other use of the ranks.
            if tp > inside:
                continue
            if shape.num_heads % tp or shape.num_kv_heads % tp or wide % tp:
                continue
            for cp in divisors(ranks // tp):
                if job.seq_len % (2 * cp):
                    continue
                yield ranks // tp // cp, tp, cp

    def _of_layout(self, job: TrainJob, layout: tuple[int, int, int]) -> Iterator[Strategy]:
        dp, tp, cp = layout
        shards = _shards(whole="whole_matrices" in work_traits(job))
        if "shard" in job.model_fields_set:
            shards = (job.shard.name,)
        elif dp * cp == 1:
            shards = (TrainJob.model_fields["shard"].default.name,)
        again: tuple[bool, ...] = (False, True)
        if "recompute" in job.model_fields_set:
            again = (job.recompute != "none",)
        for shard in shards:
            for recompute in again:
                yield Strategy(dp, tp, cp, shard, recompute)

    def _one(self, search: StageSearch, best: float, precision: str) -> Option | None:
        """Search one number of stages and micro-batch, if that can be worth it."""
        ranked = self._ranked(search)
        m, pp = search.microbatches, search.pp
        least = min(seconds for seconds, _, _ in ranked)
        bound = least / pp * (1 + (pp - 1) / m)
        if bound > _HOPELESS * best:
            return None
        keep = self._kept(ranked)
        search.strategies = [s for s in search.strategies if s.layout in keep]
        return self._run(search, precision, improve=False)

    def _run(self, search: StageSearch, precision: str, *, improve: bool) -> Option:
        if self.runnable and search.ends is None:
            return self._runnable(search, precision, improve=improve)
        result = search.run(improve=improve)
        return Option(result, precision, search.pp, search.sequences, search.pricer)

    def _ranked(self, search: StageSearch) -> list[tuple[float, float, tuple[int, int, int]]]:
        """(least time of all layers, least memory, layout) of every layout."""
        kinds = Counter(layer for layer in search.layers)
        results = []
        for layout, same in itertools.groupby(
            sorted(search.strategies, key=lambda s: s.layout), key=lambda s: s.layout
        ):
            strategies = list(same)
            seconds = memory = 0.0
            for layer, count in kinds.items():
                costs = [
                    search.pricer.layer(layer, s, search.sequences, search.pp) for s in strategies
                ]
                seconds += count * min(search.microbatches * c.micro_s + c.once_s for c in costs)
                memory += count * min(c.resident_bytes + c.held_bytes for c in costs)
            results.append((seconds, memory, layout))
        return results

    def _kept(
        self, ranked: list[tuple[float, float, tuple[int, int, int]]]
    ) -> set[tuple[int, int, int]]:
        fast = sorted(ranked)[: self.layouts - 2]
        small = sorted(ranked, key=lambda row: row[1])[:2]
        return {layout for *_, layout in (*fast, *small)}

    def _runnable(self, search: StageSearch, precision: str, *, improve: bool) -> Option:
        """The best of the searches with one layout and one sharding each, or with ends in one."""
        groups: dict[tuple[tuple[int, int, int], str], list[Strategy]] = {}
        for s in search.strategies:
            groups.setdefault((s.layout, s.shard), []).append(s)
        searches = [
            dataclasses.replace(search, strategies=strategies, _memo={})
            for strategies in groups.values()
        ]
        if not layers_alike(search.pricer.job, search.pricer.shape):
            mixed = [s for s in search.strategies if s.cp == 1]
            ends = {(s.layout, s.shard): dataclasses.replace(s, recompute=False) for s in mixed}
            searches += [
                dataclasses.replace(search, strategies=mixed, ends=one, _memo={})
                for one in ends.values()
            ]
        best: StageSolution | None = None
        for own in searches:
            result = own.run(improve=improve)
            if best is None or (result.seconds, result.missing_bytes) < (
                best.seconds,
                best.missing_bytes,
            ):
                best = result
        assert best is not None
        return Option(best, precision, search.pp, search.sequences, search.pricer)

    # Plans -------------------------------------------------------------------------------

    def _plans(
        self,
        options: list[Option],
        job: TrainJob,
        machine: Machine,
        shape: ModelShape,
        layers: Sequence[ModelLayer],
        profile: LayerProfile | None,
    ) -> list[TrainPlan]:
        priced = []
        chooser = ChunkChooser(shape, machine)
        for option in options[: 2 * self.keep]:
            assert option.solution.plan is not None
            concrete = chooser.planned(to_job(job, option.solution.plan, option.precision))
            work = Work.model_construct(shape=shape, job=concrete)
            pricer = LayerPricer(concrete, machine, shape, profile)
            cost = estimate_layers(work, machine, pricer=pricer, layers=layers)
            priced.append((concrete, cost, option.solution.plan))
        # The search has the ends run as the blocks next to them; priced, they run as the job says.
        priced.sort(key=lambda row: (not fits(row[0], machine, row[1]), row[1].step_s.value))
        best = priced[0]
        plans = []
        for place, (concrete, cost, plan) in enumerate(priced[: self.keep], 1):
            first = f"best strategy of every layer, among {len(options)} stages and micro-batches"
            item = (concrete, cost)
            why = describe(item, machine, place=place, first=first, best=(best[0], best[1]))
            notes = group_words(plan)
            why_not = layers_alike(concrete, shape) if concrete.layers_apart else ""
            if why_not:
                notes = (*notes, _PLANNED_ONLY + why_not)
            plans.append(to_plan(item, shape, machine, planner="galvatron", why=why, notes=notes))
        return plans

    def _rejected(
        self,
        options: list[Option],
        failed: list[Option],
        job: TrainJob,
        machine: Machine,
        shape: ModelShape,
        layers: Sequence[ModelLayer],
    ) -> tuple[str, ...]:
        """Why other ways lose: other numbers of stages, and one strategy for all layers."""
        best = options[0]
        assert best.solution.plan is not None
        said = []
        if not best.solution.plan.uniform:
            uniform = self.best_uniform(job, machine, shape, layers, best)
            if uniform is None:
                said.append("rejected: one strategy for all layers: none fits")
            else:
                name = uniform.solution.plan.strategies[0] if uniform.solution.plan else ""
                said.append(f"rejected: {name} for all layers: {_slower(uniform, best)}")
        seen = {best.pp}
        for option in options:
            if option.pp not in seen:
                seen.add(option.pp)
                said.append(f"rejected: pp{option.pp}: {_slower(option, best)}")
        for option in failed:
            if option.pp not in seen and math.isfinite(option.solution.missing_bytes):
                seen.add(option.pp)
                said.append(
                    f"rejected: pp{option.pp}: does not fit; stage {option.solution.stage} lacks "
                    f"{option.solution.missing_bytes / 1e9:.1f} GB under its most "
                    f"memory-efficient strategies"
                )
        return tuple(said[:8])

    def best_uniform(
        self,
        job: TrainJob,
        machine: Machine,
        shape: ModelShape,
        layers: Sequence[ModelLayer],
        like: Option,
    ) -> Option | None:
        """The best plan with one strategy for all layers, stages cut as freely as ever.

        Args:
            job: what it states is kept.
            machine: what there is.
            shape: the model's.
            layers: the model's blocks.
            like: of the same precision and number of ranks.
        """
        assert like.solution.plan is not None
        one = job.model_copy(update={"precision": like.precision})
        pricer = like.pricer
        first = like.solution.plan.strategies[0]
        world = like.pp * first.dp * first.tp * first.cp
        usable = self._usable(job, machine, world)
        tried: list[tuple[StageSearch, Option]] = []
        best = math.inf
        for pp, sequences, strategies in self._spaces(one, machine, shape, world):
            for strategy in strategies:
                search = StageSearch(
                    pricer,
                    layers,
                    [strategy],
                    pp,
                    sequences,
                    job.global_batch // sequences,
                    usable,
                    self.units,
                )
                least = min(seconds for seconds, _, _ in self._ranked(search))
                bound = least / pp * (1 + (pp - 1) / search.microbatches)
                if bound >= best:
                    continue
                option = Option(search.run(improve=False), like.precision, pp, sequences, pricer)
                best = min(best, option.solution.seconds)
                tried.append((search, option))
        wide = dataclasses.replace(self, runnable=False)
        options = [o for o in wide._improved(tried) if o.solution.plan is not None]
        return min(options, key=lambda option: option.solution.seconds, default=None)

    def _nothing_fits(
        self, job: TrainJob, machine: Machine, failed: list[Option]
    ) -> list[TrainPlan]:
        """The nearest plans of the plain search, and by how much the best layer-wise one misses."""
        nearest = failed[0]
        note = (
            f"no layer-wise plan fits: with pp = {nearest.pp} stage {nearest.solution.stage} lacks "
            f"{nearest.solution.missing_bytes / 1e9:.1f} GB under its most memory-efficient "
            f"strategies"
        )
        plans = SearchPlanner(keep=self.keep).plan(job, machine)
        changed = {"planner": "galvatron", "fits": False}
        return [plan.model_copy(update={**changed, "notes": (note, *plan.notes)}) for plan in plans]


def _beyond(job: TrainJob) -> str:
    """What the job states that layers cannot have each for itself; empty if nothing."""
    split = job.parallel
    if traits("schedule", split.schedule) or split.vpp > 1:
        return f"the schedule {split.schedule.name}"
    if split.vocab_split == "pp":
        return "a vocabulary shared by the stages"
    if job.finetune is not None:
        return f"fine-tuning by {job.finetune.name}"
    if job.shard.name not in _shards():
        return f"the sharding {job.shard.name}"
    return excluded_by(job, "layers_differ")


def _shards(*, whole: bool = False) -> tuple[str, ...]:
    """Shardings that a layer can have for itself; ``whole``: of which matrices stay whole."""
    return tuple(
        name
        for name in table("shard")
        if not traits("shard", name) & {"levels", "copies_weights"}
        and not (whole and "shards_gradients" in traits("shard", name))
    )


def _slower(option: Option, best: Option) -> str:
    share = option.solution.seconds / best.solution.seconds - 1
    stages = option.solution.stages
    m = option.solution.plan.microbatches if option.solution.plan else 1
    slowest = max(stages, key=lambda stage: stage.micro_s)
    wire = m * (sum(c.wire_s for c in slowest.layers) + slowest.change_s)
    parts = {
        "bubble": option.solution.seconds - m * slowest.micro_s - slowest.once_s,
        "communication of passes": wire + 2 * m * slowest.boundary_s,
        "gradients and update": slowest.once_s,
    }
    cause = max(parts, key=lambda name: parts[name])
    return (
        f"{100 * share:.0f} % slower; {cause} take"
        f"{'s' if cause == 'bubble' else ''} {100 * parts[cause] / option.solution.seconds:.0f} %"
    )


def group_words(plan: LayerPlan) -> tuple[str, ...]:
    """The strategies of consecutive layers in words, and the stages where there are several."""
    words = []
    if plan.ends is not None and not plan.uniform:
        words.append(f"embedding and output layer: {plan.ends}")
    first = 0
    for strategy, same in itertools.groupby(plan.strategies):
        count = len(list(same))
        last = first + count - 1
        named = f"layer {first}" if count == 1 else f"layers {first}-{last}"
        words.append(f"{named}: {strategy}")
        first += count
    if plan.pp > 1:
        words.append("stages of " + " + ".join(str(len(cut)) for cut in plan.stages) + " layers")
    return tuple(words)


def to_job(job: TrainJob, plan: LayerPlan, precision: str) -> TrainJob:
    """The concrete job of stages and strategies.

    Args:
        job: what was asked.
        plan: what was chosen; the layout of its ends becomes the job's, or that of most layers.
        precision: fp32 or bf16.
    """
    ends = (plan.ends,) if plan.ends is not None else plan.strategies
    (dp, tp, cp), _ = Counter(s.layout for s in ends).most_common(1)[0]
    shard = Counter(s.shard for s in ends).most_common(1)[0][0]
    again = {s.recompute for s in plan.strategies}
    groups = []
    if not plan.uniform:
        for strategy, same in itertools.groupby(plan.strategies):
            own = strategy.layout != (dp, tp, cp)
            groups.append(
                LayerGroup(
                    blocks=len(list(same)),
                    recompute="full" if strategy.recompute else "none",
                    dp=strategy.dp if own else None,
                    tp=strategy.tp if own else None,
                    cp=strategy.cp if own else None,
                    shard=Choice(name=strategy.shard) if strategy.shard != shard else None,
                )
            )
    split = job.parallel.model_copy(
        update={
            "dp": dp,
            "tp": tp,
            "cp": cp,
            "pp": plan.pp,
            "stages": tuple(len(cut) for cut in plan.stages) if plan.pp > 1 else (),
        }
    )
    return job.model_copy(
        update={
            "parallel": split,
            "shard": job.shard if "shard" in job.model_fields_set else Choice(name=shard),
            "microbatch": plan.sequences // dp,
            "recompute": "full" if again == {True} else "none",
            "layers": tuple(groups),
            "precision": precision,
        }
    )
