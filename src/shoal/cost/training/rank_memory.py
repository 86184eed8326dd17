"""Bytes that one rank of a training job needs, with the parts that the job chooses."""

from __future__ import annotations

import functools

from shoal.core.traits import traits
from shoal.cost.price.shares import microbatch_of, passes_of, vocab_ranks
from shoal.cost.training.chosen import ChosenParts
from shoal.cost.training.frozen import tuned_memory
from shoal.cost.training.memory import (
    ALLOCATOR_SLACK,
    RUNTIME_BYTES,
    in_flight_bytes,
    passing_bytes,
    runtime_bytes,
    standing_bytes,
)
from shoal.ir import Machine, TrainJob, Work


class RankMemory(ChosenParts):
    """Memory of the ranks of many jobs on one machine.

    Args:
        machine: the machine.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._standing: dict[tuple[object, ...], tuple[object, dict[str, float], float]] = {}
        self._kept: dict[tuple[object, ...], tuple[float, float]] = {}

    def memory(self, work: Work) -> dict[str, float]:
        """Bytes of one rank, by cause; much faster than the whole estimate."""
        work = self._made(work)
        job = work.job
        split, microbatch = job.parallel, microbatch_of(job)
        if job.offload is not None:
            tiers = self._part("offload", job.offload).estimate(work, self.machine).memory_bytes
            return {**tiers, "runtime": RUNTIME_BYTES[self.machine.device.kind]}
        result = self.plain_memory(work, microbatch, job.recompute)
        if "local_updates" in traits("sync", job.sync):
            outer = self._part("sync", job.sync).kept_bytes(work)
            result["optimizer"] = result.get("optimizer", 0.0) + outer
        if "experts_stay" not in traits("placer", split.placer):
            copied = self._part("placer", split.placer).estimate(work, self.machine).memory_bytes
            result["activations"] += copied.get("activations", 0.0)
        leaving = 0.0
        if "moves_activations" in traits("activation", job.activation):
            saved = self._part("activation", job.activation).estimate(work, self.machine)
            leaving = min(result["activations"], saved.memory_bytes.get("disk", 0.0))
            result["activations"] -= leaving
        if job.finetune is not None:
            part = self._part("peft", job.finetune)
            is_cpu = self.machine.device.kind == "cpu"
            result = tuned_memory(work, result, part, microbatch, is_cpu=is_cpu)
        return {**result, "disk": leaving} if leaving else result

    def is_plain(self, job: TrainJob) -> bool:
        """Whether :meth:`plain_memory` is all that a rank of such a job needs."""
        return (
            job.offload is None
            and job.finetune is None
            and "local_updates" not in traits("sync", job.sync)
            and "moves_activations" not in traits("activation", job.activation)
            and "experts_stay" in traits("placer", job.parallel.placer)
        )

    def plain_memory(self, work: Work, microbatch: int, recompute: str) -> dict[str, float]:
        """Bytes of one rank, by cause, that trains all weights and keeps everything to itself.

        Args:
            work: whose job says everything else.
            microbatch: sequences of a micro-batch.
            recompute: what is computed again.
        """
        job, split = work.job, work.job.parallel
        aside = (split, job.shard, job.sync, job.finetune, job.optimizer)
        kind = (job.precision, job.products, job.engine)
        key: tuple[object, ...] = (*map(id, aside), work.shape, kind)
        if key not in self._standing:
            shard = self._part("shard", job.shard)
            levels = None
            if hasattr(shard, "kept_bytes"):
                levels = functools.partial(shard.kept_bytes, job, self.machine)
            standing = standing_bytes(
                work,
                self._update(work).memory_bytes.get("optimizer", 0.0),
                shard.divides,
                self._trained(work),
                levels,
            )
            self._standing[key] = aside, standing, runtime_bytes(self.machine, split)
        _, standing, runtime = self._standing[key]
        size = (job.seq_len, microbatch, recompute, *kind)
        key = (work.shape, size, split.tp, split.sp, split.pp, split.cp, vocab_ranks(job))
        if key not in self._kept:
            is_cpu = self.machine.device.kind == "cpu"
            self._kept[key] = passing_bytes(work, is_cpu, microbatch, recompute)
        kept, logits = self._kept[key]
        passes = passes_of(job, microbatch)
        # Where passes of two micro-batches take turns, one more keeps what a stage needs.
        held = self._in_flight(split, passes) + (split.overlap == "experts") / split.vpp
        kept = in_flight_bytes(work, kept, held, microbatch, recompute)
        tensors = {**standing, "activations": kept, "logits": logits}
        return {**tensors, "runtime": runtime + ALLOCATOR_SLACK * sum(tensors.values())}
