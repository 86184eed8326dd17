"""[103] Galvatron: does a strategy for each layer pay, and does its cost model rank plans?

- The dynamic programme against an enumeration of every choice, and the whole search against the
  exact optimum of a mixed-integer programme.
- A model whose layers differ (a wide vocabulary, long attention, local attention, experts) on a
  described machine of 64 GPUs: the step of the layer-wise plan in the simulator against that of the
  best plan with one strategy for all layers, whose stages are cut as freely.
- 24 plans of a small model on two real processes over a link of 200 Mbit/s: predicted from
  measured layers, links and overlap, and then run.
- The link of such a run is cut to an eighth: a run that goes over to another plan against one
  that does not, from the cut on, what measuring and moving take included.

Sources: Miao et al., Galvatron, 2023; Liu et al., Galvatron, 2025.
"""

from __future__ import annotations

import itertools
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.galvatron_plans import gap, misses, mixed_plans
from shoal.claims.experiments.tiny import llama, train_job
from shoal.claims.frame import ClaimRun
from shoal.claims.ranks import on_ranks, slowest
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.cost.training.layer_fit import LayerProfile
from shoal.cost.training.layer_plan import plan_of, simulated_s, stage_costs
from shoal.cost.training.layers import layers_of
from shoal.cost.training.layerwise import LayerPricer
from shoal.ir import Device, Link, Machine, MemoryTier, ModelShape, TrainJob
from shoal.machine.emulate import EmulatedNetwork, emulate, unavailable

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig

__all__ = ["GalvatronClaim", "plans_of_two"]

_RANKS = "shoal.claims.experiments.galvatron_ranks"
_LENGTH, _BATCH = 128, 16
_REAL = ("rank_correlation", "mean_error", "chosen_over_best", "replanned_speedup")
_CUT = 8


@part
class GalvatronClaim(BaseClaim):
    """Search against exact optima, predictions against two real processes, a link that is cut.

    Args:
        bandwidth: byte/s of the emulated link.
        cut_from: byte/s of the link that is cut to an eighth; fast enough that another plan is
            the best one before.
        rounds: steps of a plan in a row.
        turns: how often all plans are gone through.
        final: how often the chosen plan and the fastest one are, once more.
        before: steps before the link is cut.
        after: steps after it.
        patience: steps in which another plan must be better.
    """

    bandwidth: Annotated[float, Ge(1e5), Le(1e9)] = 25e6
    cut_from: Annotated[float, Ge(1e5), Le(1e9)] = 200e6
    rounds: Annotated[int, Ge(1)] = 2
    turns: Annotated[int, Ge(1)] = 4
    final: Annotated[int, Ge(1)] = 12
    before: Annotated[int, Ge(1)] = 12
    after: Annotated[int, Ge(1)] = 120
    patience: Annotated[int, Ge(1)] = 20

    rows: ClassVar[tuple[int, ...]] = (103,)

    def __post_init__(self) -> None:
        where = "claim.galvatron"
        require(
            self.after > self.patience,
            f"{where}.after",
            self.after,
            expected=f"more than patience = {self.patience} steps",
        )

    def collect(self, run: ClaimRun) -> None:
        """Search and simulate; the full run also runs two processes, for some five minutes."""
        run.progress("every choice of small cases", 0.0)
        run.put("programme_misses", misses(200, greedy=run.as_baseline))
        run.progress("layers that differ", 0.1)
        mixed = run.remember("mixed", mixed_plans)
        run.put("layerwise_speedup", run.pick(mixed.layerwise_s, mixed.uniform_s), mixed.uniform_s)
        run.details["mixed"] = mixed.as_record()
        if run.quick:
            return
        run.progress("the exact optimum", 0.15)
        run.details["exact"] = run.remember("exact", lambda: gap(mixed))
        reason = unavailable()
        if reason is not None:
            run.skip(reason, *_REAL)
            return
        self._real(run)

    # Two real processes ------------------------------------------------------------------

    def _real(self, run: ClaimRun) -> None:
        from shoal.cost.training.layer_fit import LinkFit

        config = llama(128, 6, 4, kv_heads=2, vocab=2048, length=_LENGTH)
        jobs = plans_of_two()
        run.progress("layers, links and overlap", 0.2)
        profile = run.remember("profile", lambda: self._profile(config))
        run.progress("24 plans", 0.3)
        measured = run.remember("plans", lambda: self._timed(jobs, config, self.turns))
        machine = _two(self.bandwidth)
        # The A/A run predicts as if links took no time.
        no_wire = tuple(
            LinkFit(op=op, group=2, latency_s=0.0, bandwidth=1e15)
            for op in ("all_reduce", "gather", "scatter", "send")
        )
        priced = run.pick(profile, profile.model_copy(update={"links": no_wire}))
        predicted = [_predicted(job, machine, config.shape(), priced) for job in jobs]
        middle = [statistics.median(seconds) for seconds in measured]
        chosen, best = int(np.argmin(predicted)), int(np.argmin(middle))
        from scipy.stats import spearmanr  # a second of imports, which a list of claims is spared

        run.put("rank_correlation", float(spearmanr(predicted, middle).statistic))
        # The plans are these 24, not a sample of some: their mean has no interval of its own.
        errors = [abs(p / m - 1) for p, m in zip(predicted, middle, strict=True)]
        run.put("mean_error", statistics.fmean(errors))
        # The fastest of many that were timed was lucky, too: both are timed again, in turns.
        final = run.remember(
            f"final {chosen} {best}",
            lambda: self._timed([jobs[chosen], jobs[best]], config, self.final),
        )
        run.put("chosen_over_best", *final)
        run.progress("a link that is cut", 0.6)
        times = self.cut_from / self.bandwidth
        links = tuple(
            fit.model_copy(update={"bandwidth": times * fit.bandwidth}) for fit in profile.links
        )
        faster = profile.model_copy(update={"links": links})
        fresh = [_predicted(job, machine, config.shape(), faster) for job in jobs]
        first = jobs[int(np.argmin(fresh))]
        stays = run.remember("stays", lambda: self._cut(run, first, jobs, config, faster, False))
        moves = stays if run.as_baseline else self._cut(run, first, jobs, config, faster, True)
        tail = [sum(one["seconds"][self.before :]) for one in (moves, stays)]
        run.put("replanned_speedup", *tail)
        run.details |= {
            "plans": [
                {"plan": _named(job), "predicted_s": p, "measured_s": m}
                for job, p, m in zip(jobs, predicted, middle, strict=True)
            ],
            "profile": profile.model_dump(mode="json"),
            "replan": {"stays": stays, "moves": moves},
        }
        run.profile = (
            f"predicted best {_named(jobs[chosen])} {1e3 * predicted[chosen]:.0f} ms, "
            f"measured {1e3 * middle[chosen]:.0f} ms; measured best {_named(jobs[best])} "
            f"{1e3 * middle[best]:.0f} ms; after the cut {tail[1]:.0f} s without and "
            f"{tail[0]:.0f} s with another plan"
        )

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
        with emulate(2, bandwidth=self.bandwidth) as network:
            ranks = on_ranks(
                f"{_RANKS}:time_plans", 2, network=network, timeout_s=900.0, jobs=jobs,
                config=config, rounds=self.rounds, turns=turns,
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
        signal = run.work_dir / f"step-{adapts}.json"
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
    import json

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
    return [
        train_job(
            seq_len=_LENGTH,
            global_batch=_BATCH,
            steps=1,
            optimizer={"name": "adamw", "lr": 1e-4},
            parallel=parallel,
            **extra,
        )
        for parallel, extra in rows
    ]


def _named(job: TrainJob) -> str:
    split = job.parallel
    words = [f"dp{split.dp} tp{split.tp} pp{split.pp}", job.shard.name, f"mb{job.microbatch}"]
    if split.stages:
        words.append("+".join(map(str, split.stages)))
    if job.layers:
        words.append("recompute some")
    elif job.recompute != "none":
        words.append("recompute")
    return " ".join(words)


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
