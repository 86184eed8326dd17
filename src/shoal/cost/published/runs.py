"""A published training step, and the job, engine and machine as which it is priced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shoal.cost.gpu.device import Accelerator
from shoal.cost.gpu.spec import EngineSpec, Recompute
from shoal.ir import Device, Link, Machine, MemoryTier, ModelShape, TrainJob

_SHARDS = ("replicated", "zero1", "zero2", "zero3")
_PLAIN = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class PublishedRun:
    """One training step, in full.

    Args:
        seq_len: tokens of a sequence.
        micro_batch: sequences of one pass.
        global_batch: sequences of a step.
        engine: how it is run.
        vpp: chunks of a stage.
        sp: norms and residuals are divided over the tensor ranks.
        zero: what is divided over data-parallel ranks, 0 to 3.
        schedule: 1f1b, interleaved_1f1b, or gpipe.
        vocab: who shares the output layer: tp, or all stages (pp).
        recompute: what runs again: nothing; attention's inside; half of each block; all.
        precision: bf16, fp16, fp32, fp8 (per tensor), mxfp8, fp8-rows or fp4.
        tuned: all weights are trained, or only adapters beside them (lora).
        overlap: communication that overlaps with other micro-batches: nothing, or experts' tokens.
        window: keys that a query sees at most, 0 for all; and on which share of layers.
    """

    shape: ModelShape
    seq_len: int
    micro_batch: int
    global_batch: int
    engine: EngineSpec
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    sp: bool = False
    zero: int = 0
    schedule: str = "1f1b"
    vocab: Literal["tp", "pp"] = "tp"
    recompute: Recompute = "none"
    precision: str = "bf16"
    tuned: Literal["all", "lora"] = "all"
    overlap: Literal["none", "experts"] = "none"
    window: tuple[int, float] = (0, 0.0)

    @property
    def devices(self) -> int:
        """All ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def passes(self) -> float:
        """Micro-batches of a rank in a step."""
        return max(1.0, self.global_batch / self.dp / self.micro_batch)


def job_of(run: PublishedRun) -> TrainJob:
    """The job of a run; what a job cannot say is the engine's, see :func:`engine_as_run`."""
    return TrainJob.model_validate(
        {
            "model": run.shape.name,
            "seq_len": run.seq_len,
            "global_batch": run.global_batch,
            "microbatch": run.micro_batch,
            "precision": "fp32" if run.precision == "fp32" else "bf16",
            "parallel": {
                "dp": run.dp,
                "tp": run.tp,
                "pp": run.pp,
                "cp": run.cp,
                "ep": run.ep,
                "vpp": run.vpp,
                "sp": run.sp,
                "overlap": run.overlap,
                "vocab": "pp" if run.vocab == "pp" else "auto",
                "schedule": "interleaved" if run.vpp > 1 else "1f1b",
            },
            "shard": _SHARDS[run.zero],
            "recompute": "full" if run.recompute in ("full", "stage") else "none",
            "finetune": "lora" if run.tuned == "lora" else None,
        }
    )


def engine_as_run(run: PublishedRun) -> EngineSpec:
    """The engine with its settings in this run."""
    # A tiled kernel computes attention's inside again in any case.
    tiled = run.recompute == "selective" and run.engine.attention != "plain"
    again = "none" if tiled or run.recompute in ("full", "stage") else run.recompute
    return replace(
        run.engine,
        products="" if run.precision in _PLAIN else run.precision,
        again=again,
        window=run.window,
    )


def machine_of(gpu: Accelerator, devices: int) -> Machine:
    """``devices`` accelerators with their links."""
    domain = min(gpu.domain, devices)
    return Machine(
        name=gpu.name,
        nodes=-(-devices // domain),
        devices_per_node=domain,
        device=Device(
            name=gpu.name,
            kind="gpu",
            peak_flops=dict(gpu.peak),
            matmul_flops=dict(gpu.matmul),
            sustained=gpu.sustained,
            memory=(
                MemoryTier(name="hbm", capacity_bytes=int(gpu.capacity), read_bandwidth=gpu.stream),
            ),
        ),
        links=(
            Link(scope="device", bandwidth=gpu.inside, latency_s=gpu.near_s),
            Link(scope="node", bandwidth=gpu.outside, latency_s=gpu.far_s),
        ),
        provenance="declared",
    )
