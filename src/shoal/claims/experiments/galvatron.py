"""[103] Galvatron: does a strategy for each layer pay, and does its cost model rank plans?

- A model with a wide vocabulary on two real processes over a link of 200 Mbit/s: the plan that the
  search makes layer by layer, its vocabulary shared and its blocks not, against the best of the
  plans with one strategy for all layers, and against the best of those with one stage.
- The same of a model whose layers differ (a wide vocabulary, long attention, local attention,
  experts) on a described machine of 64 GPUs, in the simulator; and that plan against the exact
  optimum of a mixed-integer programme.
- 24 plans of a small model on these two processes: predicted from measured layers, links and
  overlap, and then run.
- The link of such a run is cut to an eighth: a run that goes over to another plan against one
  that does not, from the cut on, what measuring and moving take included; several times.

Sources: Miao et al., Galvatron, 2023; Liu et al., Galvatron, 2025.
"""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Ge, Le
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import llama, train_job
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.layer_exact import optimum
from shoal.claims.ranks import on_ranks, slowest
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.cost.shapes import resolve
from shoal.cost.training.layer_fit import LayerProfile, LinkFit
from shoal.cost.training.layer_plan import plan_of, simulated_s, stage_costs
from shoal.cost.training.layers import ModelLayer, layers_of
from shoal.cost.training.layerwise import LayerPricer
from shoal.ir import Device, Link, Machine, MemoryTier, ModelShape, TrainJob
from shoal.machine.described import load
from shoal.machine.emulate import EmulatedNetwork, emulate, unavailable
from shoal.plan.strategy.galvatron import Galvatron, Option, to_job
from shoal.plan.strategy.layer_search import StageSearch

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig

_RANKS = "shoal.claims.experiments.galvatron_ranks"
_LENGTH, _BATCH, _HIDDEN, _BLOCKS = 128, 16, 128, 6
_LAYERWISE = ("layerwise_speedup", "layerwise_one_stage")
_REAL = (*_LAYERWISE, "rank_correlation", "mean_error", "chosen_over_best", "replanned_speedup")
_CUT = 8
# As wide for its width as that of the model on the described machine.
_WIDE = 64 * _HIDDEN
# So many of the plans that are predicted to be the fastest are timed, to find the fastest.
_TIMED, _TURNS = 6, 5


@part
class GalvatronClaim(BaseClaim, row=103):
    """Search against exact optima, plans on two real processes, a link that is cut.

    Args:
        bandwidth: byte/s of the emulated link.
        cut_from: byte/s of the link that is cut to an eighth; fast enough that another plan is
            the best one before.
        turns: number of rounds over all plans.
        final: number of further rounds over the plans that are compared with each other.
        cuts: number of times that the link is cut, in a run of each kind.
        before: steps before the link is cut.
        after: steps after it.
        patience: steps in which another plan must be better.
    """

    bandwidth: Annotated[float, Ge(1e5), Le(1e9)] = 25e6
    cut_from: Annotated[float, Ge(1e5), Le(1e9)] = 200e6
    turns: Annotated[int, Ge(1)] = 8
    final: Annotated[int, Ge(1)] = 24
    cuts: Annotated[int, Ge(1)] = 5
    before: Annotated[int, Ge(1)] = 12
    after: Annotated[int, Ge(1)] = 120
    patience: Annotated[int, Ge(1)] = 20

    def __post_init__(self) -> None:
        require(
            self.after > self.patience,
            "claim.galvatron.after",
            self.after,
            expected=f"more than patience = {self.patience} steps",
        )

    def collect(self, run: ClaimRun) -> None:
        """Search and simulate; the full run also runs two processes, for some twenty minutes."""
        run.progress("layers that differ", 0.0)
        mixed = run.remember("mixed", mixed_plans)
        layerwise_s = run.pick(mixed.layerwise_s, mixed.uniform_s)
        run.put("layerwise_simulated", layerwise_s, mixed.uniform_s)
        if run.quick:
            return
        run.progress("the exact optimum", 0.04)
        run.details["exact"] = run.remember("exact", lambda: gap(mixed))
        if run.lacks(unavailable(), *_REAL):
            return
        run.progress("a wide vocabulary", 0.1)
        self._layerwise(run)
        run.progress("layers, links and overlap", 0.15)
        profile = run.remember("profile", lambda: self._profile(_small()))
        run.progress("24 plans", 0.2)
        self._ranked(run, profile)
        run.progress("a link that is cut", 0.4)
        self._replanned(run, profile)

    # Two real processes ------------------------------------------------------------------

    def _layerwise(self, run: ClaimRun) -> None:
        """The best plan whose layers differ, and the best of one strategy for all of them."""
        config = _small(vocab=_WIDE)
        profile = run.remember("wide profile", lambda: self._profile(config))
        machine, shape, job = _two(self.bandwidth), config.shape(), _job({})
        planner = Galvatron(runnable=True)
        good, _ = planner.search(job, machine, shape, layers_of(shape), profile=profile, world=2)
        made = [to_job(job, o.solution.plan, "fp32") for o in good if o.solution.plan is not None]
        layerwise = next(one for one in made if one.layers_apart)

        def fastest(plans: list[TrainJob]) -> TrainJob:
            """By its time, of the plans that are predicted to be the fastest."""
            plans.sort(key=lambda one: _predicted(one, machine, shape, profile))
            times = self._timed(plans[:_TIMED], config, _TURNS)
            return min(zip(plans, times, strict=False), key=lambda row: statistics.median(row[1]))[
                0
            ]

        uniform = [*plans_of_two(), *(one for one in made if not one.layers)]
        one_stage = [one for one in uniform if one.parallel.pp == 1]
        best, flat = run.remember("uniform", lambda: (fastest(uniform), fastest(one_stage)))
        arms = [run.pick(layerwise, best), best, run.pick(layerwise, flat), flat]
        times = self._timed(arms, config, self.final)
        middle = [statistics.median(seconds) for seconds in times]
        # What it would take if links took no time.
        least = _predicted(layerwise, machine, shape, _no_wire(profile))
        for at, metric in enumerate(_LAYERWISE):
            method, baseline = times[2 * at : 2 * at + 2]
            run.put(metric, method, baseline, bound=middle[2 * at + 1] / least)
        rows = [
            {"plan": _named(one), "predicted_s": _predicted(one, machine, shape, profile)}
            for one in arms
        ]
        measured = zip(rows, middle, strict=True)
        run.details["layerwise"] = [row | {"measured_s": seconds} for row, seconds in measured]
        run.profile = "; ".join(
            f"{row['plan']} {1e3 * seconds:.0f} ms"
            for row, seconds in zip(rows, middle, strict=True)
        )
        run.profile += f"; the first without its communication {1e3 * least:.0f} ms; "

    def _ranked(self, run: ClaimRun, profile: LayerProfile) -> None:
        """24 plans, predicted and run."""
        jobs, config, machine = plans_of_two(), _small(), _two(self.bandwidth)
        measured = run.remember("plans", lambda: self._timed(jobs, config, self.turns))
        # The A/A run predicts as if links took no time.
        priced = run.pick(profile, _no_wire(profile))
        predicted = [_predicted(job, machine, config.shape(), priced) for job in jobs]
        middle = [statistics.median(seconds) for seconds in measured]
        chosen, best = int(np.argmin(predicted)), int(np.argmin(middle))
        from scipy.stats import spearmanr  # a second of imports, which a list of claims is spared

        # Every turn is a measurement of all plans.
        turns = list(zip(*measured, strict=True))
        run.put("rank_correlation", [float(spearmanr(predicted, t).statistic) for t in turns])
        off = np.abs(np.divide.outer(1.0, np.array(turns)) * np.array(predicted) - 1)
        run.put("mean_error", off.mean(axis=1))
        # The fastest of many that were timed was lucky, too: both are timed again, in turns.
        final = run.remember(
            f"final {chosen} {best}",
            lambda: self._timed([jobs[chosen], jobs[best]], config, self.final),
        )
        run.put("chosen_over_best", *final)
        run.details["plans"] = [
            {"plan": _named(job), "predicted_s": p, "measured_s": m}
            for job, p, m in zip(jobs, predicted, middle, strict=True)
        ]
        run.profile += (
            f"predicted best {_named(jobs[chosen])} {1e3 * predicted[chosen]:.0f} ms, "
            f"measured {1e3 * middle[chosen]:.0f} ms; measured best {_named(jobs[best])} "
            f"{1e3 * middle[best]:.0f} ms"
        )

    def _replanned(self, run: ClaimRun, profile: LayerProfile) -> None:
        """A link that is cut, and runs that go over to another plan or do not."""
        jobs, config, machine = plans_of_two(), _small(), _two(self.cut_from)
        times = self.cut_from / self.bandwidth
        links = (
            one.model_copy(update={"bandwidth": times * one.bandwidth}) for one in profile.links
        )
        faster = profile.model_copy(update={"links": tuple(links)})
        first = min(jobs, key=lambda job: _predicted(job, machine, config.shape(), faster))

        def cut(adapts: bool) -> dict[str, Any]:
            return self._cut(run, first, jobs, config, faster, adapts)

        arms = {"moves": lambda: cut(not run.as_baseline), "stays": lambda: cut(False)}
        runs = run.turns(arms, self.cuts)
        tails = [[sum(one["seconds"][self.before :]) for one in runs[arm]] for arm in arms]
        run.put("replanned_speedup", *tails)
        run.details["replan"] = runs

    def _profile(self, config: ModelConfig) -> LayerProfile:
        from shoal.claims.lab.measure_layers import profile_of

        with emulate(2, bandwidth=self.bandwidth) as network:
            return profile_of(
                on_ranks(
                    f"{_RANKS}:measured", 2, network=network, timeout_s=240.0, config=config,
                    seq_len=_LENGTH, sizes=[2, 4, 8], tps=[1, 2], repeats=7,
                )
            )  # fmt: skip

    def _timed(
        self, jobs: Sequence[TrainJob], config: ModelConfig, turns: int
    ) -> list[tuple[float, ...]]:
        """Seconds of a step of each plan by turn."""
        with emulate(2, bandwidth=self.bandwidth) as network:
            ranks = on_ranks(
                f"{_RANKS}:time_plans", 2, network=network, timeout_s=900.0, jobs=jobs,
                config=config, turns=turns,
            )  # fmt: skip
        return [slowest(ranks, plan) for plan in ranks[0]]

    def _cut(
        self,
        run: ClaimRun,
        first: TrainJob,
        jobs: Sequence[TrainJob],
        config: ModelConfig,
        profile: LayerProfile,
        adapts: bool,
    ) -> dict[str, Any]:
        signal = run.work_dir / "step.json"
        signal.unlink(missing_ok=True)
        policy = {"enabled": adapts, "patience": self.patience}
        begin = TrainJob.model_validate(first.model_dump(mode="json") | {"replan": policy})
        with emulate(2, bandwidth=self.cut_from) as network:
            stop = threading.Event()
            cutter = threading.Thread(
                target=_cut_at, args=(network, signal, self.before, self.cut_from / _CUT, stop)
            )
            cutter.start()
            try:
                ranks = on_ranks(
                    f"{_RANKS}:run_with_replan", 2, network=network, timeout_s=900.0, job=begin,
                    plans=jobs, config=config, machine=_two(self.cut_from), profile=profile,
                    steps=self.before + self.after, signal=str(signal),
                )  # fmt: skip
            finally:
                stop.set()
                cutter.join()
        return {**ranks[0], "seconds": slowest(ranks, "seconds")}


def _cut_at(
    network: EmulatedNetwork, signal: Path, step: int, bandwidth: float, stop: threading.Event
) -> None:
    """Give both hosts another rate once a step has ended."""
    while not stop.wait(0.02):
        if signal.exists() and int(json.loads(signal.read_text())["step"]) >= step - 1:
            for host, sends in itertools.product((0, 1), (True, False)):
                network.reshape(host, bandwidth, sends=sends)
            return


def _two(bandwidth: float) -> Machine:
    """Two hosts of one core each, whose rates were not probed: layers and links are measured."""
    return Machine(
        name="two-processes",
        provenance="emulated",
        nodes=2,
        device=Device(
            name="one thread",
            kind="cpu",
            num_cores=1,
            matmul_flops={"fp32": 3e10},
            memory=(MemoryTier(name="dram", capacity_bytes=2**34, read_bandwidth=1e10),),
        ),
        links=(Link(scope="node", bandwidth=bandwidth, latency_s=1e-4),),
    )


def plans_of_two() -> list[TrainJob]:
    """24 plans of two ranks that this version runs."""
    half = [{"blocks": 3, "recompute": "full"}, {"blocks": 3, "recompute": "none"}]
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for shard, sizes in (
        ("replicated", (8, 4, 2)),
        ("zero1", (8, 4)),
        ("zero2", (8, 4)),
        ("zero3", (8, 4)),
    ):
        rows += [({"dp": 2}, {"shard": shard, "microbatch": size}) for size in sizes]
    rows.append(({"dp": 2}, {"microbatch": 4, "recompute": "full"}))
    rows.append(({"dp": 2}, {"microbatch": 8, "layers": half}))
    rows.append(({"dp": 2}, {"microbatch": 8, "shard": "zero3", "recompute": "full"}))
    rows += [({"tp": 2}, {"microbatch": size}) for size in (16, 8, 4)]
    rows.append(({"tp": 2}, {"microbatch": 8, "recompute": "full"}))
    for stages in ([3, 3], [4, 2]):
        rows += [({"pp": 2, "stages": stages}, {"microbatch": size}) for size in (4, 2)]
    rows.append(({"pp": 2, "stages": [3, 3]}, {"microbatch": 8}))
    rows.append(({"pp": 2, "stages": [4, 2]}, {"microbatch": 2, "recompute": "full"}))
    rows.append(({"pp": 2, "stages": [4, 2]}, {"microbatch": 2, "layers": half}))
    rows.append(({"pp": 2, "stages": [5, 1]}, {"microbatch": 2}))
    return [_job({"parallel": parallel} | extra) for parallel, extra in rows]


def _small(vocab: int = 2048) -> ModelConfig:
    return llama(_HIDDEN, _BLOCKS, 4, kv_heads=2, vocab=vocab, length=_LENGTH)


def _job(fields: dict[str, Any]) -> TrainJob:
    adamw = {"name": "adamw", "lr": 1e-4}
    return train_job(seq_len=_LENGTH, global_batch=_BATCH, steps=1, optimizer=adamw, **fields)


def _named(job: TrainJob) -> str:
    split = job.parallel
    words = [f"dp{split.dp} tp{split.tp} pp{split.pp}", job.shard.name, f"mb{job.microbatch}"]
    if split.stages:
        words.append("+".join(map(str, split.stages)))
    if job.layers_apart:
        groups = ((group.blocks, *job.degrees(group), group.shard) for group in job.layers)
        words += [
            f"{n} blocks dp{dp} tp{tp} {shard or ''}".strip() for n, dp, tp, _, shard in groups
        ]
    elif job.layers:
        words.append("recompute some")
    elif job.recompute != "none":
        words.append("recompute")
    return " ".join(words)


def _no_wire(profile: LayerProfile) -> LayerProfile:
    """The same with links that take no time."""
    ops = ("all_reduce", "gather", "scatter", "send")
    links = tuple(LinkFit(op=op, group=2, latency_s=0.0, bandwidth=1e15) for op in ops)
    return profile.model_copy(update={"links": links})


def _predicted(job: TrainJob, machine: Machine, shape: ModelShape, profile: LayerProfile) -> float:
    """Seconds of a step of a plan."""
    plan = plan_of(job, shape)
    stages = stage_costs(LayerPricer(job, machine, shape, profile), layers_of(shape), plan)
    sends = profile.link("send", 2, 1)
    wired = machine
    if sends is not None:
        link = Link(scope="node", bandwidth=min(sends.bandwidth, 9e14), latency_s=sends.latency_s)
        wired = machine.model_copy(update={"links": (link,)})
    return simulated_s(stages, plan, job, wired, shape.hidden) + profile.step_s


# Layers that differ ----------------------------------------------------------------------


class MixedPlan(NamedTuple):
    """The layer-wise plan and the best uniform one."""

    option: Option
    layerwise_s: float
    uniform_s: float
    job: TrainJob
    machine: Machine
    shape: ModelShape
    layers: tuple[ModelLayer, ...]


def mixed_model() -> tuple[ModelShape, tuple[ModelLayer, ...]]:
    """A wide vocabulary, and blocks of three kinds: long attention, local attention, experts."""
    base = resolve("Llama-3-8B").model_copy(
        update={"vocab_size": 262144, "max_position": 16384, "num_layers": 12, "name": "mixed"}
    )
    one = base.model_copy(update={"num_layers": 1, "vocab_size": 1})
    long = ModelLayer("long", one)
    local = ModelLayer("local", one.model_copy(update={"ffn_hidden": 28672}), span=1024)
    sparse = one.model_copy(update={"num_experts": 64, "top_k": 2, "expert_hidden": 14336})
    experts = ModelLayer("experts", sparse)
    return base, (long, local, experts) * 4


def mixed_plans() -> MixedPlan:
    """Both plans of that model on 64 devices."""
    shape, layers = mixed_model()
    machine = load("64xA100-40GB")
    job = TrainJob.model_validate(
        {
            "model": "Llama-3-8B",
            "steps": 1,
            "seq_len": 16384,
            "global_batch": 64,
            "precision": "bf16",
        }
    )
    planner = Galvatron(layouts=4)
    result, _ = planner.search(job, machine, shape, layers)
    option = result[0]
    uniform = planner.best_uniform(job, machine, shape, layers, option)
    assert uniform is not None

    def simulated(one: Option) -> float:
        assert one.solution.plan is not None
        return simulated_s(one.solution.stages, one.solution.plan, job, machine, shape.hidden)

    return MixedPlan(option, simulated(option), simulated(uniform), job, machine, shape, layers)


def gap(mixed: MixedPlan) -> dict[str, JsonValue]:
    """How far the plan is above the exact optimum for its stages and micro-batch."""
    planner = Galvatron()
    option = mixed.option
    job, machine, sequences = mixed.job, mixed.machine, option.sequences
    spaces = planner._spaces(job, machine, mixed.shape, 64)
    strategies = next(s for *at, s in spaces if at == [option.pp, sequences])
    pricer, usable = LayerPricer(job, machine, mixed.shape), planner._usable(job, machine, 64)
    search = StageSearch(
        pricer,
        mixed.layers,
        strategies,
        option.pp,
        sequences,
        job.global_batch // sequences,
        usable,
    )
    begin = time.perf_counter()
    best = optimum(search, timeout_s=90.0)
    return {
        "found_s": option.solution.seconds,
        "optimum_s": best.seconds,
        "bound_s": best.bound,
        "gap": option.solution.seconds / best.bound - 1,
        "solver_s": time.perf_counter() - begin,
        "strategies": len(strategies),
    }
