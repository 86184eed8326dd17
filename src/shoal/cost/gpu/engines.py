"""Engines that plans are handed over to, as their documentation and code say that they run a step.

Sources: NVIDIA, Megatron-LM, arguments of Megatron Core 0.12 and later (overlapped tensor and
pipeline communication, distributed optimizer), and Megatron-Bridge (NeMo; recorded graphs; its
benchmark of ``overlap_moe_expert_parallel_comm`` with HybridEP, July 2026); Liang
et al., TorchTitan, 2024 (selective recomputation keeps every other product); Microsoft, DeepSpeed,
configuration (``communication_data_type``, ``overlap_comm``); Hugging Face, Accelerate, FSDP plugin
(``MixedPrecision`` in the type of the job).
"""

from __future__ import annotations

from dataclasses import replace

from shoal.core.errors import PlanError, require
from shoal.cost.gpu.spec import SHOAL, EngineSpec
from shoal.ir import Machine, Parallel, TrainJob

MEGATRON = EngineSpec(
    "Megatron-Core",
    attention="best",
    tensor_overlap=0.6,
    pipe_overlap=True,
    dedup=True,
    # Qwen3-30B-A3B on 16 H100: a step of 24.71 s, 8.25 s of it exchanging, became one of 20.99 s.
    expert_overlap=0.45,
    low=(("fp8", "fp8"), ("mxfp8", "mxfp8")),
    masters=True,
    launched_as="megatron",
)
# Of training scripts of Hugging Face models, gradients travel in the type of the job.
ENGINES = {
    "shoal": SHOAL,
    "megatron": MEGATRON,
    "nemo": replace(MEGATRON, name="NeMo", graphs=True),
    "torchtitan": EngineSpec(
        "torchtitan",
        style="eager",
        attention="flash2",
        selective="half",
        low=(("fp8", "fp8-rows"), ("mxfp8", "mxfp8")),
        copies=True,
        launched_as="torchtitan",
    ),
    "deepspeed": EngineSpec(
        "DeepSpeed",
        style="eager",
        attention="flash2",
        grad_bytes=2.0,
        masters=True,
        launched_as="deepspeed",
    ),
    "accelerate": EngineSpec(
        "Accelerate, FSDP",
        style="eager",
        attention="flash2",
        grad_bytes=2.0,
        copies=True,
        launched_as="accelerate",
    ),
}


def engine_of(job: TrainJob) -> EngineSpec:
    """The engine of a job on an accelerator, with what the job asks of it."""
    engine = ENGINES[job.engine]
    if job.compile:
        engine = engine.compiled()
    return replace(engine, products=dict(engine.low).get(job.products, ""))


def overlaps_experts(job: TrainJob, split: Parallel) -> bool:
    """Whether the engine of a job can overlap the exchange of tokens with another micro-batch.

    Passes of two micro-batches take turns on a rank; in a pipeline those of two of its stages.
    """
    return ENGINES[job.engine].expert_overlap > 0 and (
        split.ep > 1 and (split.pp == 1 or split.vpp > 1)
    )


def check_overlap(job: TrainJob) -> None:
    """Refuse to hide the exchange of experts' tokens where the engine cannot.

    Raises:
        PlanError: says what it takes.
    """
    split = job.parallel
    if split.overlap != "experts":
        return
    able = [name for name, engine in ENGINES.items() if engine.expert_overlap]
    require(
        overlaps_experts(job, split) and job.recompute not in ("full", "stage"),
        "parallel.overlap",
        "experts",
        expected=f"none, or engine {' or '.join(able)} with ep above 1, several stages a rank "
        "(vpp above 1) where pp is above 1, and recompute none or selective",
        error=PlanError,
    )


def check_products(job: TrainJob, machine: Machine) -> None:
    """Refuse a dtype of products that the engine or the device does not support.

    Raises:
        PlanError: names what has it.
    """
    wanted, device = job.products, machine.device
    if wanted == "same":
        return
    able = [name for name, engine in ENGINES.items() if wanted in dict(engine.low)]
    if job.engine not in able:
        raise PlanError(
            f"products = {wanted}: engine {job.engine} computes its products in the precision of "
            f"the job; give --engine {' or '.join(able)}, or products: same"
        )
    # Products scaled by 32 numbers came with those of four bits.
    rate = "fp4" if wanted == "mxfp8" else "fp8"
    if device.kind != "gpu" or not (device.peak_flops.get(rate) or device.matmul_flops.get(rate)):
        raise PlanError(
            f"products = {wanted}: {device.name} has no such products"
            f"{'; give fp8' if wanted == 'mxfp8' and device.peak_flops.get('fp8') else ''}; give "
            "same to compute in the precision of the job"
        )
