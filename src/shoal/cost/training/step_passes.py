"""Seconds of the passes of a training step: all operators of a rank, or those of each stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from shoal.cost.gpu.device import CALIBRATED, GpuCalibration
from shoal.cost.gpu.engines import ENGINES, engine_of
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

# Operators of the ends of a model; all others are of its blocks.
_ENDS = {"embedding": "embed", "logits": "head", "loss": "head", "final_norm": "norm"}

# What is computed again, as shares of each kind of operator, or of one by name: what latent
# attention gets from its compressed queries, keys and values. Half: attention is kept, every other
# product and all elementwise operators run again.
_AGAIN: dict[str, dict[str, float]] = {
    "none": {},
    "selective": {"attention": 1.0},
    "elementwise": {"memory": 1.0, "q_up": 1.0, "kv_up": 1.0},
    "half": {"matmul": 0.5, "memory": 1.0},
}
_ALL = {"matmul": 1.0, "attention": 1.0, "memory": 1.0}


def _grid(split: Parallel) -> tuple[int, int] | None:
    """Degrees ep and etp, where experts have a grid of their own."""
    return (split.ep, split.etp) if split.folded else None


class StagePasses(NamedTuple):
    """One micro-batch on one rank.

    Args:
        forward: forward pass; on an accelerator of all blocks, without output layer and loss.
        backward: backward pass, by the amount of recomputation.
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
        engine: what runs the jobs on an accelerator; the engine of each job if not given.
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
        return self.engine or engine_of(job)

    def _foreign(self, job: TrainJob) -> EngineSpec | None:
        """The engine, where it is another than Shoal's own runtime."""
        own = self.engine is None and ENGINES[job.engine] is SHOAL
        return None if own or self.machine.device.kind == "cpu" else self._engine(job)

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
            *(job.engine, job.products, self._frozen(work)),
        )
        if key in self._passes:
            return self._passes[key]
        forward = ends = last = PassSeconds()
        engine = self._engine(job)
        again = {"none": _AGAIN["none" if self.engine is None else engine.again]}
        again |= {"selective": _AGAIN[engine.selective], "full": _ALL}
        backward = dict.fromkeys((*again, "stage"), PassSeconds())
        for op, once, back in self._operators(work, rates, microbatch, pp):
            if not rates.is_cpu and _ENDS.get(op.name) in ("head", "norm"):
                ends, last = ends + once, last + back
                continue
            forward += once
            for recompute in backward:
                backward[recompute] += back
                shares = _ALL if recompute == "stage" else again[recompute] if op.recomputed else {}
                if share := shares.get(op.name, shares.get(op.kind, 0.0)):
                    backward[recompute] += once.scaled(share)
        self._passes[key] = StagePasses(forward, backward, ends, last)
        return self._passes[key]

    def operators(self, work: Work) -> list[tuple[OpGroup, PassSeconds, PassSeconds]]:
        """What one rank with all blocks runs for a micro-batch: seconds forward and backward.

        Recomputation is left out; ranks that share the sequences share these seconds.
        """
        work = self._made(work)
        rates = self._rates(work.job)
        return list(self._operators(work, rates, microbatch_of(work.job), 1))

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
                frozen=self._frozen(work),
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
                frozen=self._frozen(work),
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
        tensor += dispatch(job, shape, self.machine, microbatch, {}, self._engine(job)) / 2
        part = self._part("schedule", split.schedule)
        schedule: Schedule = part.build(split.pp, passes_of(job), split.vpp)
        cells = schedule.num_cells - schedule.bare_head
        again = 1.0 if job.sends_again else 0.0
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
