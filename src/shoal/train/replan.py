"""Another plan while a run goes on, when what it measures has drifted from what was planned.

Every step gives the ranks a moving average of how long it took and how long each rank computed;
when the average leaves the last reference, the links are measured again. The plans that this
version can run are then priced with what was measured: each rank's own pace and the links as they
are. If another plan is shorter by the wanted share in so many consecutive steps, the run goes
over to it at the end of a step, without a checkpoint (:mod:`shoal.train.reshard`).

All ranks see the same numbers (the slowest rank's) and so decide alike.

Source: Liu et al., Galvatron, 2025 (runtime adaptation).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shoal.cost.training.layer_fit import LayerProfile, LinkFit, fit_link
from shoal.cost.training.layer_plan import LayerPlan, plan_of, seconds_of, stage_costs
from shoal.cost.training.layers import layers_of
from shoal.cost.training.layerwise import LayerPricer
from shoal.ir import Machine, ModelShape, TrainJob
from shoal.parallel.legal import check_split
from shoal.plan.strategy.galvatron import Galvatron, to_job
from shoal.train.hooks import RankRun, RunHook

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm
    from shoal.train.loop import TrainStepResult

# Steps that are not measured: memory and threads are cold.
_WARMUP = 2
# The links are measured again when the mean step has moved by this share.
_DRIFT = 0.1
_BETWEEN = 5  # steps at least between two measurements
# Bytes of the messages; the larger one is more than switches and shapers let pass at once.
_SIZES = (4096, 2**20)
_REPEATS = 2
_TAG = "probe"


class Change(NamedTuple):
    """A plan that is better now.

    Args:
        job: its concrete job.
        gain: predicted share of a step that it saves.
        reason: what has drifted, in words.
    """

    job: TrainJob
    gain: float
    reason: str


def link_calls(comm: Comm, size: int, *, tag: str) -> dict[str, tuple[float, Callable[[], None]]]:
    """Of each operation among all ranks: bytes that a rank sends, and the call that sends them.

    Args:
        comm: all ranks, two or more.
        size: bytes of the whole tensor, rounded down to equal parts.
        tag: of the messages.
    """
    import torch

    n = comm.world
    count = size // 4 // n * n
    whole = torch.zeros(count, device=comm.device)
    part = torch.zeros(count // n, device=comm.device)
    buffer = torch.empty_like(whole)

    def swap() -> None:
        other = comm.receive(buffer, (comm.rank - 1) % n, tag=tag)
        own = comm.send(whole, (comm.rank + 1) % n, tag=tag)
        other.wait()
        own.wait()

    share = 4.0 * count * (n - 1) / n
    return {
        "all_reduce": (2 * share, lambda: comm.all_reduce(whole, tag=tag).wait()),
        "gather": (share, lambda: comm.all_gather(whole, part, tag=tag).wait()),
        "scatter": (share, lambda: comm.reduce_scatter(part, whole, tag=tag).wait()),
        "send": (4.0 * count, swap),
    }


def measure_links(comm: Comm) -> tuple[LinkFit, ...]:
    """Fits of sums, gathers and messages among all ranks, as they are at the moment.

    Every rank calls it; all get the slowest rank's numbers.
    """
    import torch

    if comm.world == 1:
        return ()
    ops = ("all_reduce", "gather", "send")
    points: dict[str, list[tuple[float, float]]] = {op: [] for op in ops}
    for size in _SIZES:
        calls = link_calls(comm, size, tag=_TAG)
        for op in ops:
            sent, call = calls[op]
            results = []
            for _ in range(_REPEATS):
                comm.barrier()
                begin = time.perf_counter()
                call()
                results.append(time.perf_counter() - begin)
            slowest = torch.tensor([statistics.median(results)], dtype=torch.float64)
            slowest = slowest.to(comm.device)
            comm.all_reduce(slowest, tag=_TAG, op="max").wait()
            points[op].append((sent, float(slowest)))
    fits = []
    for op in ops:
        group = 2 if op == "send" else comm.world
        small, large = points[op]
        # Noise can make the larger message the faster one; then its rate is all there is.
        large = (large[0], max(large[1], 1.001 * small[1]))
        fits.append(fit_link(op, [small, large], group=group))  # type: ignore[arg-type]
    return tuple(fits)


@dataclass
class _Known:
    """A plan that could be gone over to."""

    job: TrainJob
    plan: LayerPlan


class Replanner:
    """Watches a run and says when another plan is better.

    Args:
        profile: earlier measurements of the layers; otherwise the machine's rates are used.
        plans: concrete jobs to choose from; those of the planner if not given.
    """

    def __init__(
        self,
        job: TrainJob,
        machine: Machine,
        shape: ModelShape,
        comm: Comm,
        *,
        profile: LayerProfile | None = None,
        plans: Sequence[TrainJob] = (),
    ) -> None:
        self.job, self.machine, self.shape, self.comm = job, machine, shape, comm
        self.policy = job.replan
        self.profile = profile or LayerProfile()
        self.layers = layers_of(shape)
        self.mean_s: float | None = None
        self.pace = [1.0] * comm.world
        """By rank, how much longer it computes than the fastest, beside what was predicted."""
        self.links: tuple[LinkFit, ...] = ()
        self.wins = 0
        self._seen = 0
        self._since_probe = 0
        self._reference: float | None = None
        self._best: tuple[_Known, float, float] | None = None
        self._busy: list[float] = []
        own = _Known(job, plan_of(job, shape))
        self._current = own
        self._others = [_Known(other, plan_of(other, shape)) for other in plans]
        self._others = self._others or self._planned()

    def _planned(self) -> list[_Known]:
        """Plans of as many ranks that this version runs."""
        fields = {"parallel", "shard", "recompute", "microbatch", "layers"}
        kept = self.job.model_dump(mode="json", exclude=fields)
        open_job = TrainJob.model_validate(kept)
        planner = Galvatron(runnable=True)
        good, _ = planner.search(
            open_job,
            self.machine,
            self.shape,
            self.layers,
            profile=self.profile,
            world=self.comm.world,
        )
        results = []
        for option in good:
            assert option.solution.plan is not None
            concrete = to_job(open_job, option.solution.plan, self.job.precision)
            results.append(_Known(concrete, option.solution.plan))
        return results

    def predicted_s(self, known: _Known | None = None) -> float:
        """Seconds of a step of a plan with paces and links as measured; the current one's."""
        known = known or self._current
        profile = self.profile.model_copy(update={"links": self.links or self.profile.links})
        pricer = LayerPricer(known.job, self.machine, self.shape, profile)
        stages = stage_costs(pricer, self.layers, known.plan)
        layout = known.job.parallel.attention()
        slow = []
        for stage, cost in enumerate(stages):
            ranks = [r for r in range(layout.world) if layout.coord(r)["pp"] == stage]
            pace = max(self.pace[rank] for rank in ranks)
            slow.append(_Paced(cost.compute_s * (pace - 1) + cost.micro_s, cost.once_s))
        return seconds_of(slow, known.plan.microbatches)

    def busy_s(self) -> list[float]:
        """By rank, seconds that the current plan's passes take, as predicted."""
        profile = self.profile.model_copy(update={"links": self.links or self.profile.links})
        pricer = LayerPricer(self._current.job, self.machine, self.shape, profile)
        stages = stage_costs(pricer, self.layers, self._current.plan)
        layout = self._current.job.parallel.attention()
        m = self._current.plan.microbatches
        passes = [m * (stage.forward_s + stage.backward_s) for stage in stages]
        return [passes[layout.coord(rank)["pp"]] for rank in range(layout.world)]

    def observe(self, seconds: float, busy: float) -> Change | None:
        """Take in one step; all ranks call it after every step.

        Args:
            seconds: the step took on this rank.
            busy: of these, in passes of this rank.

        Returns:
            What to go over to, the same on all ranks, or None.
        """
        import torch

        mine = torch.zeros(1 + self.comm.world, dtype=torch.float64, device=self.comm.device)
        mine[0], mine[1 + self.comm.rank] = seconds, busy
        self.comm.all_reduce(mine, tag=_TAG, op="max").wait()
        slowest, *each = mine.tolist()
        self._seen += 1
        if self._seen <= _WARMUP:
            return None
        weight = self.policy.smoothing
        if self.mean_s is None:
            self.mean_s = slowest
            self._busy = each
        else:
            self.mean_s += weight * (slowest - self.mean_s)
            self._busy = [b + weight * (e - b) for b, e in zip(self._busy, each, strict=True)]
        self._since_probe += 1
        reference = self._reference
        drifted = reference is None or (
            self._since_probe >= _BETWEEN and abs(self.mean_s / reference - 1) > _DRIFT
        )
        if drifted or self._since_probe >= self.policy.probe_every:
            self.links = measure_links(self.comm)
            self._since_probe, self._reference = 0, self.mean_s
            self._price()
        return self._decide()

    def _price(self) -> None:
        """Price every plan with what is known now."""
        expected = self.busy_s()
        ratios = [max(1e-3, b / e) for b, e in zip(self._busy, expected, strict=True)]
        # Communication behind the passes slows those of all ranks: a link, not a slow rank.
        self.pace = [ratio / min(ratios) for ratio in ratios]
        now = self.predicted_s()
        best, least = self._current, now
        for known in self._others:
            seconds = self.predicted_s(known)
            if seconds < least:
                best, least = known, seconds
        self._best = (best, least, now)

    def _decide(self) -> Change | None:
        if self._best is None:
            return None
        best, least, now = self._best
        gain = 1 - least / now
        if best is self._current or gain <= self.policy.gain:
            self.wins = 0
            return None
        self.wins += 1
        if self.wins < self.policy.patience:
            return None
        job = best.job.model_copy(update={"replan": self.policy})
        check_split(job, self.shape)
        rate = min((fit.bandwidth for fit in self.links), default=0.0)
        reason = (
            f"a step takes {1e3 * (self.mean_s or 0.0):.0f} ms; links give {rate / 1e6:.1f} MB/s "
            f"and the slowest rank computes {max(self.pace):.2f} times as long as the fastest"
        )
        return Change(job, gain, reason)

    def changed(self, job: TrainJob) -> None:
        """The run has gone over to ``job``."""
        self._others.append(self._current)
        self._current = _Known(job, plan_of(job, self.shape))
        self.job = job
        self.mean_s = self._reference = self._best = None
        self._seen = self.wins = self._since_probe = 0


class ReplanHook(RunHook):
    """Changes to another plan after a step if that is predicted to save time."""

    kind = "replan"

    def __init__(self, run: RankRun) -> None:
        plan = run.plan
        self._replanner = Replanner(plan.job, plan.machine, plan.shape, run.comm)

    def step_begins(self, run: RankRun, number: int) -> bool:
        """Every step says how long ranks compute."""
        return True

    def step_done(self, run: RankRun, number: int, result: TrainStepResult) -> None:
        """Compare plans, and change over."""
        if run.ends(number, result):
            return
        passes = run.trainer.engine.runtime.events or []
        busy = sum(event.end - event.start for event in passes)
        change = self._replanner.observe(result.seconds, busy)
        if change is None:
            return
        from shoal.train.reshard import switch

        begin = time.perf_counter()
        run.saves.changing()
        trainer, sent = switch(run.trainer, change.job, run.tokens, run.comm)
        run.go_on(trainer)
        self._replanner.changed(change.job)
        run.event(
            "replan",
            step=number,
            seconds=time.perf_counter() - begin,
            gain=change.gain,
            reason=change.reason,
            moved_bytes=sent,
            parallel=change.job.parallel.model_dump(mode="json", exclude_defaults=True),
            shard=str(change.job.shard),
            microbatch=change.job.microbatch,
        )


class _Paced(NamedTuple):
    """A stage at its rank's pace."""

    micro_s: float
    once_s: float
