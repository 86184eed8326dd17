"""Seconds of the passes of a training step: all operators of a rank, or those of each stage."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.cost.price.experts import dispatch
from shoal.cost.price.ops import OpGroup, Style, operators
from shoal.cost.price.passes import PassSeconds, op_pass
from shoal.cost.price.rates import Curve, RankRates
from shoal.cost.price.shares import microbatch_of, passes_of, vocab_ranks
from shoal.cost.training.chosen import ChosenParts
from shoal.cost.training.wire import tensor_parallel_s
from shoal.ir import Machine, OpCosts, Parallel, Schedule, TrainJob, Work

__all__ = ["StepPasses"]

# Operators of the ends of a model; all others are of its blocks.
_ENDS = {"embedding": "embed", "logits": "head", "loss": "head", "final_norm": "norm"}


def _grid(split: Parallel) -> tuple[int, int] | None:
    """Degrees ep and etp, where experts have a grid of their own."""
    return (split.ep, split.etp) if split.folded else None


class StepPasses(ChosenParts):
    """Passes of many jobs on one machine.

    Args:
        machine: the machine.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._passes: dict[tuple[object, ...], tuple[PassSeconds, dict[str, PassSeconds]]] = {}
        self._curves: dict[tuple[object, ...], tuple[Curve, Curve]] = {}

    def _both(
        self, work: Work, rates: RankRates, microbatch: int
    ) -> tuple[PassSeconds, PassSeconds]:
        """Seconds of one micro-batch forward and backward, recomputation included."""
        job = work.job
        forward, backward = self._ranks_passes(work, rates, microbatch, job.parallel.pp)
        cp = job.parallel.cp
        return forward.shared(cp), backward[job.recompute].shared(cp)

    def _ranks_passes(
        self, work: Work, rates: RankRates, microbatch: int, pp: int
    ) -> tuple[PassSeconds, dict[str, PassSeconds]]:
        """One micro-batch forward, and backward by recomputation, with sequences on one rank."""
        job, split = work.job, work.job.parallel
        key = (
            *(work.shape, job.seq_len, microbatch, job.precision, job.compile, pp),
            *(split.tp, vocab_ranks(job), _grid(split), rates.used, rates.sharing),
        )
        if key in self._passes:
            return self._passes[key]
        forward = PassSeconds()
        backward = {"none": PassSeconds(), "full": PassSeconds(), "stage": PassSeconds()}
        for op, once, back in self._operators(work, rates, microbatch, pp):
            forward += once
            for recompute in backward:
                backward[recompute] += back
                if recompute == "stage" or (recompute == "full" and op.recomputed):
                    backward[recompute] += once
        self._passes[key] = forward, backward
        return forward, backward

    def _operators(
        self, work: Work, rates: RankRates, microbatch: int, pp: int
    ) -> Iterator[tuple[OpGroup, PassSeconds, PassSeconds]]:
        """Operators of a micro-batch on one rank, each with its seconds forward and backward."""
        job = work.job
        matmul, stream = self._curves_of(job, rates)
        style: Style = "fused" if job.compile else "cpu" if rates.is_cpu else "gpu"
        for op in operators(
            work.shape,
            seq_len=job.seq_len,
            microbatch=microbatch,
            precision=job.precision,
            style=style,
            tp=job.parallel.tp,
            pp=pp,
            vocab=vocab_ranks(job),
            experts=_grid(job.parallel),
        ):
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
        rates = RankRates(self.machine, split, job.threads)
        microbatch = microbatch_of(job)
        launch = self.machine.device.op_overhead_s * rates.crowding if rates.is_cpu else 0.0
        seconds: dict[tuple[str, bool], float] = {}
        for op, *both in self._operators(work, rates, microbatch, split.pp):
            for late, result in zip((False, True), both, strict=True):
                key = (_ENDS.get(op.name, "body"), late)
                own = result.device / split.cp + result.calls * launch
                seconds[key] = seconds.get(key, 0.0) + own
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
