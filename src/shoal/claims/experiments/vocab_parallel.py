"""Vocabulary parallelism: all ranks of a pipeline share embedding and output layer.

- Four ranks, sixteen micro-batches, an output layer as large as two stages: every pass is
  measured on this machine, and the steps are simulated with these times and with the measured
  cost of a message. Against 1F1B with equal stages, and against the best cut of blocks and
  output layer that leaves the vocabulary whole.
- The share of the fullest rank in parameters, and of the busiest in seconds, over its ranks'
  mean, for vocabularies of 32k to 256k.
- Two processes train a model with a vocabulary of 32k in turn, with the vocabulary split and
  with 1F1B over blocks that are cut as evenly as the output layer allows; peak memory is that of
  processes of their own.
- Micro-batches in flight, counted in the passes that ranks really did.

The baseline's loss is :func:`~shoal.model.loss.token_loss_sum`, which never keeps all logits.

Source: Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism, 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.pipeline_ranks import peak_memory, profile, time_steps
from shoal.claims.experiments.tiny import llama, train_job
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.cost.pipeline.simulator import simulate
from shoal.ir import TrainJob
from shoal.ir.schedule import Event, OpCosts
from shoal.parallel.legal import check_split, schedule_of
from shoal.plan.partition import partition, stages_for, uniform_stages
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from shoal.claims.lab.measure_passes import MeasuredPasses
    from shoal.model.config import ModelConfig

# Four blocks of a stage take about half as long as the output layer does, if both keep their
# memory from step to step.
_RANKS, _MICROBATCHES, _BLOCKS = 4, 16, 4
_HIDDEN, _LENGTH = 256, 128
_VOCABULARIES = (32 * 1024, 64 * 1024, 128 * 1024, 256 * 1024)


@part
class VocabParallel(BaseClaim, row=113):
    """Passes of the vocabulary on all ranks, against output layers in one place.

    Args:
        rounds: measured steps of every rank.
        pairs: timed steps of two processes, each way.
    """

    rounds: Annotated[int, Ge(1)] = 7
    pairs: Annotated[int, Ge(1)] = 20

    def collect(self, run: ClaimRun) -> None:
        """Count parameters and micro-batches; the full run also times, for about 3 min."""
        run.progress("parameters and micro-batches in flight", 0.0)
        vocab = run.pick("pp", "none")
        run.put("parameter_imbalance", (parameter_share(size, vocab) for size in _VOCABULARIES))
        schedule = run.pick("1f1b", "gpipe")
        run.put("in_flight_one_barrier", in_flight(schedule, 1))
        run.put("in_flight_two_barriers", in_flight(schedule, 2))
        if run.quick:
            return
        keep_freed_memory()  # as the ranks of a training run do
        self._simulated(run)
        run.progress("passes by size of the vocabulary", 0.3)
        self._busy(run, vocab)
        run.progress("steps of two processes", 0.5)
        self._processes(run)

    def _simulated(self, run: ClaimRun) -> None:
        """Simulated steps with measured passes, round by round."""
        from shoal.claims.lab.measure_passes import measure_link

        run.progress("passes of every rank", 0.1)
        naive, split = self._passes(run, _VOCABULARIES[0])
        nbytes = int(naive.rounds[0].boundary_bytes)
        link = run.remember("link", lambda: measure_link(nbytes))
        # The last stage's rank sends its output to all others, one message after the other.
        meet = (_RANKS - 1) * link.seconds(0, 1, nbytes)
        whole, parts = schedule_of(_job(_MICROBATCHES)), schedule_of(_job(_MICROBATCHES, "pp"))
        cells = _cells(_VOCABULARIES[0])
        plain, uneven, method = [], [], []
        for before, after in zip(naive.rounds, split.rounds, strict=True):
            plain.append(simulate(whole, recut(before, cells, best=False), link).makespan)
            uneven.append(simulate(whole, recut(before, cells, best=True), link).makespan)
            costs = after.model_copy(update={"barrier_s": meet})
            method.append(simulate(parts, costs, link).makespan)
        # If all ranks did the split passes evenly and never waited, not even while it fills.
        work = sum(sum(seconds) for seconds in split.median.seconds.values())
        shared = _MICROBATCHES * work / _RANKS
        for name, baseline, best in (
            ("simulated_speedup", plain, False),
            ("redistributed_speedup", uneven, True),
        ):
            alone = recut(naive.median, cells, best=best)
            bound = simulate(whole, alone, link).makespan / shared
            run.put(name, run.pick(method, baseline), baseline, bound=bound)

    def _passes(self, run: ClaimRun, vocab_size: int) -> list[MeasuredPasses]:
        """Measured passes without and with a split vocabulary."""
        from shoal.claims.lab.measure_passes import measure_passes

        config = _model(vocab_size, _RANKS * _BLOCKS)
        # Four micro-batches are timed; sixteen are simulated.
        jobs = [_job(4), _job(4, "pp")]
        return run.remember(
            f"passes {vocab_size}", lambda: measure_passes(jobs, config, rounds=self.rounds)
        )

    def _busy(self, run: ClaimRun, vocab: str) -> None:
        """Busy seconds of the busiest rank over the mean, by round, of the worst vocabulary."""

        def imbalance(size: int, costs: OpCosts) -> float:
            if vocab == "none":
                costs = recut(costs, _cells(size), best=False)
            busy = simulate(schedule_of(_job(_MICROBATCHES, vocab)), costs).busy
            return max(busy) / float(np.mean(busy))

        by_size = (
            [imbalance(size, costs) for costs in self._passes(run, size)[vocab == "pp"].rounds]
            for size in _VOCABULARIES
        )
        run.put("busy_imbalance", map(max, zip(*by_size, strict=True)))

    def _processes(self, run: ClaimRun) -> None:
        """Steps and peak memory of two processes."""
        config = _model(_VOCABULARIES[0], 6)
        jobs = [_job(_MICROBATCHES, vocab, pp=2) for vocab in ("none", run.pick("pp", "none"))]
        result = time_steps(jobs, config, pairs=self.pairs, seed=run.seed)
        baseline, method = result.seconds
        run.put("two_process_speedup", method, baseline)
        run.progress("peak memory", 0.9)
        peaks = [[peak_memory(job, config) for job in jobs] for _ in range(3)]
        run.put("peak_memory", (max(after) for _, after in peaks), (max(b) for b, _ in peaks))
        run.profile = "\n".join(
            profile(events, title=f"vocabulary: {job.parallel.vocab}")
            for job, events in zip(jobs, result.events, strict=True)
        )


def recut(costs: OpCosts, cells: Sequence[range], *, best: bool) -> OpCosts:
    """Costs of another cut into stages, from measured stages of 1F1B.

    A block costs what a middle stage takes for each of its blocks; the output layer what the last
    stage takes beyond its blocks; the embedding nothing. ``best``: cut as evenly as can be.
    """
    stages, number = len(cells), cells[-1].stop
    parts = []
    for kind in "FB":
        seconds = costs.seconds[kind]
        each = [seconds[i] / len(cells[i]) for i in range(1, stages - 1)]
        block = float(np.median(each))
        parts.append([block] * number + [max(0.0, seconds[-1] - block * len(cells[-1]))])
    cut = uniform_stages(number, stages)
    cut = (*cut[:-1], range(cut[-1].start, number + 1))
    if best:
        cut = partition([f + b for f, b in zip(*parts, strict=True)], stages)
    forward, backward = (tuple(sum(of[i] for i in cell) for cell in cut) for of in parts)
    return costs.model_copy(update={"seconds": {"F": forward, "B": backward}})


def _cells(vocab_size: int) -> tuple[range, ...]:
    """How the engine cuts the blocks where the vocabulary is not split."""
    shape = _model(vocab_size, _RANKS * _BLOCKS).shape()
    return stages_for(shape, _RANKS, vocab_split="none")


def _model(vocab_size: int, num_layers: int) -> ModelConfig:
    return llama(_HIDDEN, num_layers, 4, vocab=vocab_size, length=_LENGTH)


def _job(
    microbatches: int,
    vocab: str = "none",
    *,
    pp: int = _RANKS,
    schedule: str = "1f1b",
    barriers: int = 1,
    seq_len: int = _LENGTH,
) -> TrainJob:
    split = {"pp": pp, "vocab": vocab, "vocab_barriers": barriers, "schedule": schedule}
    return train_job(
        seq_len=seq_len, global_batch=microbatches, microbatch=1, steps=1, parallel=split
    )


def parameter_share(vocab_size: int, vocab: str) -> float:
    """Parameters of the fullest of four ranks over their mean; nothing is allocated."""
    import torch

    from shoal.claims.lab.measure_passes import SingleRankComm
    from shoal.parallel.comm.ranks import ranks_of
    from shoal.parallel.pipeline.stage import LocalModel
    from shoal.parallel.vocab.passes import VocabShard

    config, job = _model(vocab_size, _RANKS * _BLOCKS), _job(_MICROBATCHES, vocab)
    schedule = check_split(job, config.shape())
    layers = uniform_stages(config.num_layers, _RANKS)
    sizes = []
    for rank in range(_RANKS):
        comms = ranks_of(SingleRankComm(rank, _RANKS), job.parallel)
        local = LocalModel(
            config, {rank: layers[rank]}, num_stages=_RANKS, parallel=job.parallel, ranks=comms
        )
        size = sum(p.numel() for p in local.parameters())
        if schedule.vocab_barriers:
            with torch.device("meta"):
                shard = VocabShard(config, comms.pp, schedule, device="meta")
            size += sum(p.numel() for p in shard.parameters())
        sizes.append(size)
    return max(sizes) / (sum(sizes) / _RANKS)


def in_flight(schedule: str, barriers: int) -> list[int]:
    """By rank, most micro-batches between forward and backward at once, in passes really done."""
    from shoal.claims.lab.measure_passes import batch
    from shoal.claims.lab.session import RankSession
    from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks

    config = _model(256, _RANKS)
    job = _job(_MICROBATCHES, "pp", schedule=schedule, barriers=barriers, seq_len=8)

    def step(comm: ThreadComm) -> int:
        session = RankSession(comm, job, config)
        session.passes(batch(job, config.vocab_size), record=True)
        return _most(session.engine.runtime.events or [])

    return run_ranks(_RANKS, step)


def _most(events: Sequence[Event]) -> int:
    held = most = 0
    for event in sorted(events, key=lambda event: event.start):
        held += {"F": 1, "B": -1}.get(event.op.kind, 0)
        most = max(most, held)
    return most
