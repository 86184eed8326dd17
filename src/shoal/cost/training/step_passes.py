"""Seconds of the passes of a training step: all operators of a rank, or those of each stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from shoal.cost.gpu.device import CALIBRATED, GpuCalibration
from shoal.cost.gpu.spec import SHOAL, EngineSpec
from shoal.cost.price.accelerated import CALLS, accelerated
from shoal.cost.price.experts import dispatch
from shoal.cost.price.ops import OpGroup, operators
from shoal.cost.price.passes import PassSeconds, op_pass
from shoal.cost.price.rates import Curve, RankRates
from shoal.cost.price.shares import microbatch_of, passes_of, vocab_ranks
from shoal.cost.training.chosen import ChosenParts
from shoal.cost.training.wire import tensor_parallel_s
from shoal.ir import Machine, OpCosts, Parallel, Schedule, TrainJob, Work

__all__ = ["StepPasses"]

# Operators of the ends of a model; all others are of its blocks.
_ENDS = {"embedding": "embed", "logits": "head", "loss": "head", "final_norm": "norm"}

# What an engine computes again where a job says nothing, as shares of each kind of operator. Half:
# attention is kept, every other product and all elementwise operators run again.
_AGAIN: dict[str, dict[str, float]] = {
    "none": {},
    "selective": {"attention": 1.0},
    "half": {"matmul": 0.5, "memory": 1.0},
}


def _grid(split: Parallel) -> tuple[int, int] | None:
    """Degrees ep and etp, where experts have a grid of their own."""
    return (split.ep, split.etp) if split.folded else None


class StagePasses(NamedTuple):
    """One micro-batch on one rank.

    Args:
        forward: forward pass; on an accelerator of all blocks, without output layer and loss.
        backward: backward pass, by what is computed again.
        ends: forward pass of output layer and loss, on an accelerator.
        last: their backward pass.
    """

    forward: PassSeconds
    backward: dict[str, PassSeconds]
    ends: PassSeconds
    last: PassSeconds


class StepPasses(ChosenParts):
    """Passes of many jobs on one machine.

    Args:
        machine: the machine.
        engine: what runs the jobs on an accelerator; Shoal itself if not given.
        constants: of accelerators; those that plans are priced with if not given.
    """

    def __init__(
        self,
        machine: Machine,
        engine: EngineSpec | None = None,
        constants: GpuCalibration = CALIBRATED,
    ) -> None:
        # Links reach what the constants of plans say; others are a machine with other links.
        super().__init__(machine.with_links(constants.wire / CALIBRATED.wire))
        self.engine = engine
        self.constants = replace(constants, wire=CALIBRATED.wire)
        self._passes: dict[tuple[object, ...], StagePasses] = {}
        self._curves: dict[tuple[object, ...], tuple[Curve, Curve]] = {}

    def _engine(self, job: TrainJob) -> EngineSpec:
        if self.engine is not None:
            return self.engine
        return SHOAL.compiled() if job.compile else SHOAL

    def _rates(self, job: TrainJob) -> RankRates:
        return RankRates(self.machine, job.parallel, job.threads, self.constants)

    def _launch_s(self, job: TrainJob) -> float:
        """Seconds of the host for one operator or kernel."""
        if self.machine.device.kind == "gpu" and self._engine(job).style in CALLS:
            return self.constants.host
        return self.machine.device.op_overhead_s

    def _both(
        self, work: Work, rates: RankRates, microbatch: int
    ) -> tuple[PassSeconds, PassSeconds, float]:
        """One micro-batch forward and backward on the busiest stage, recomputation included.

        And what a stage takes in the mean, as a share of that.
        """
        job = work.job
        split, layers = job.parallel, work.shape.num_layers
        one = self._ranks_passes(work, rates, microbatch, split.pp if rates.is_cpu else 1)
        ahead, behind, first, last = (
            each.shared(split.cp)
            for each in (one.forward, one.backward[job.recompute], one.ends, one.last)
        )
        if rates.is_cpu or split.pp == 1:
            return ahead + first, behind + last, 1.0
        body, ends = (ahead + behind).device, (first + last).device
        if split.vocab_split == "pp":
            most = final = -(-layers // split.pp)
            usual = tail = body * most / layers + ends
        else:
            most, final = self._cut(job, layers, body / layers, ends)
            usual, tail = body * most / layers, body * final / layers + ends
        mean = (usual * (split.pp - 1) + tail) / split.pp
        if tail < usual:
            busiest = most / layers
            return ahead.scaled(busiest), behind.scaled(busiest), mean / usual
        busiest = final / layers
        return ahead.scaled(busiest) + first, behind.scaled(busiest) + last, mean / tail

    def _cut(self, job: TrainJob, layers: int, each: float, ends: float) -> tuple[int, int]:
        """Blocks of an ordinary stage and of the last one, which has the output layer.

        Shoal cuts the blocks so that the slowest stage is as fast as it can be; other engines
        divide them evenly where that goes.
        """
        pp = job.parallel.pp
        if layers % pp == 0 and not self._engine(job).uneven:
            return layers // pp, layers // pp
        best = (math.inf, layers, layers)
        for last in range(1, -(-layers // pp) + 1):
            others = -(-(layers - last) // (pp - 1))
            best = min(best, (max(others * each, last * each + ends), others, last))
        return best[1], best[2]

    def _ranks_passes(self, work: Work, rates: RankRates, microbatch: int, pp: int) -> StagePasses:
        """One micro-batch of the fullest of ``pp`` stages, with its sequences on one rank."""
        job, split = work.job, work.job.parallel
        key = (
            *(work.shape, job.seq_len, microbatch, job.precision, job.compile, pp, split.sp),
            *(split.tp, vocab_ranks(job), _grid(split), rates.used, rates.sharing),
            job.finetune is None,
        )
        if key in self._passes:
            return self._passes[key]
        forward = ends = last = PassSeconds()
        backward = {"none": PassSeconds(), "full": PassSeconds(), "stage": PassSeconds()}
        for op, once, back in self._operators(work, rates, microbatch, pp):
            if not rates.is_cpu and _ENDS.get(op.name) in ("head", "norm"):
                ends, last = ends + once, last + back
                continue
            forward += once
            for recompute in backward:
                backward[recompute] += back
                if recompute == "stage" or (recompute == "full" and op.recomputed):
                    backward[recompute] += once
                elif recompute == "none" and self.engine is not None and op.recomputed:
                    backward[recompute] += once.scaled(_AGAIN[self.engine.again].get(op.kind, 0.0))
        self._passes[key] = StagePasses(forward, backward, ends, last)
        return self._passes[key]

    def _operators(
        self, work: Work, rates: RankRates, microbatch: int, pp: int
    ) -> Iterator[tuple[OpGroup, PassSeconds, PassSeconds]]:
        """Operators of a micro-batch on one rank, each with its seconds forward and backward."""
        job, split = work.job, work.job.parallel
        matmul, stream = self._curves_of(job, rates)
        if rates.is_cpu:
            ops = operators(
                work.shape,
                seq_len=job.seq_len,
                microbatch=microbatch,
                precision=job.precision,
                style="fused" if job.compile else "cpu",
                tp=split.tp,
                pp=pp,
                vocab=vocab_ranks(job),
                experts=_grid(split),
            )
        else:
            ops = accelerated(
                work.shape,
                seq_len=job.seq_len,
                microbatch=microbatch,
                precision=job.precision,
                engine=self._engine(job),
                tp=split.tp,
                pp=pp,
                sp=split.sp,
                vocab=vocab_ranks(job),
                experts=_grid(split),
                frozen=job.finetune is not None,
            )
        for op in ops:
            once = op_pass(op, False, matmul, stream, job.precision, rates.is_cpu)
            back = op_pass(op, True, matmul, stream, job.precision, rates.is_cpu)
            yield op, once, back

    def _curves_of(self, job: TrainJob, rates: RankRates) -> tuple[Curve, Curve]:
        """FLOP/s over the edge of a product, and byte/s over the bytes of an operator."""
        key = (job.precision, rates.used, rates.sharing)
        if key not in self._curves:
            self._curves[key] = (rates.matmul_curve(job.precision), rates.stream_curve())
        return self._curves[key]

    def passes(self, work: Work) -> OpCosts:
        """What each pass of the job's pipeline takes, stage by stage, tensor parallelism included.

        The first stage has the embedding and the last one the output layer, unless all
        ranks share the vocabulary in passes of their own.
        """
        job, shape = work.job, work.shape
        split = job.parallel
        rates = self._rates(job)
        microbatch = microbatch_of(job)
        launch = self.machine.device.op_overhead_s * rates.crowding if rates.is_cpu else 0.0
        # Where operators are not counted one by one, the small ones of the ends have no entry.
        ends = itertools.product(("body", "embed", "head", "norm"), (False, True))
        seconds: dict[tuple[str, bool], float] = dict.fromkeys(ends, 0.0)
        for op, *both in self._operators(work, rates, microbatch, split.pp):
            for late, result in zip((False, True), both, strict=True):
                key = (_ENDS.get(op.name, "body"), late)
                own = result.device / split.cp + result.calls * launch
                seconds[key] += own
        tensor = tensor_parallel_s(work, self.machine, microbatch, {}) / 2
        tensor += dispatch(job, shape, self.machine, microbatch, {}) / 2
        part = self._part("schedule", split.schedule)
        schedule: Schedule = part.build(split.pp, passes_of(job), split.vpp)
        cells = schedule.num_cells - schedule.bare_head
        again = 0.0 if job.recompute == "none" else 1.0
        forward = (seconds["body", False] + tensor) * split.pp / cells
        backward = (seconds["body", True] + tensor) * split.pp / cells + again * forward
        ahead, behind = [forward] * cells, [backward] * cells
        if schedule.bare_head:
            ahead, behind = [*ahead, 0.0], [*behind, 0.0]
        table: dict[str, tuple[float, ...]] = {}
        ahead[-1] += seconds["norm", False]
        behind[-1] += seconds["norm", True]
        if split.vocab_split == "pp":
            head = (seconds["head", False] + seconds["head", True]) / 2
            table = dict.fromkeys(("S", "T"), (head,) * split.pp)
            table["EF"] = (seconds["embed", False] / split.pp,) * split.pp
            table["EB"] = (seconds["embed", True] / split.pp,) * split.pp
        else:
            ahead[0] += seconds["embed", False]
            behind[0] += seconds["embed", True]
            ahead[-1] += seconds["head", False]
            behind[-1] += seconds["head", True]
        each = schedule.cell_of
        table |= {"F": tuple(ahead[c] for c in each), "B": tuple(behind[c] for c in each)}
        table |= dict.fromkeys(("I", "W"), tuple(b / 2 for b in table["B"]))
        width = 2.0 if job.precision == "bf16" else 4.0
        tokens = microbatch * job.seq_len / split.cp
        return OpCosts(seconds=table, boundary_bytes=width * tokens * shape.hidden / split.tp)
