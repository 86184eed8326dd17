"""Engines of the published runs: what their documentation and code say of how a step is run."""

from __future__ import annotations

import re
from dataclasses import replace

from shoal.cost.gpu.engines import ENGINES as HANDED_OVER
from shoal.cost.gpu.engines import MEGATRON
from shoal.cost.gpu.spec import EngineSpec

_MEGATRON_21 = EngineSpec(
    "Megatron-LM 2021",
    attention="plain",
    data_overlap=False,
    sharded_update=False,
    grad_bytes=4.0,
    loss_bytes=48.0,
)
ENGINES: dict[str, EngineSpec] = {
    "megatron-2021": _MEGATRON_21,
    "megatron-2022": replace(_MEGATRON_21, name="Megatron-LM 2022"),
    "megatron-core": MEGATRON,
    "megatron-plain": replace(
        MEGATRON,
        name="Megatron-Core, no overlap",
        tensor_overlap=0.0,
        data_overlap=False,
        pipe_overlap=False,
    ),
    "bridge": replace(MEGATRON, name="Megatron-Bridge"),
    "bridge-2025": replace(MEGATRON, name="Megatron-Bridge before 26.04", fused_experts=False),
    "mlperf": replace(MEGATRON, name="NeMo MLPerf", graphs=True),
    "torchtitan": HANDED_OVER["torchtitan"],
    "torchtitan-compile": replace(
        HANDED_OVER["torchtitan"].compiled(), name="torchtitan, compiled"
    ),
    "composer": EngineSpec(
        "Composer, FSDP", style="eager", attention="flash1", loss_bytes=32.0, grad_bytes=2.0
    ),
    "nanotron": EngineSpec("nanotron", attention="flash2", data_overlap=False),
    "deepspeed": EngineSpec(
        "Megatron-DeepSpeed", attention="plain", grad_bytes=2.0, loss_bytes=48.0
    ),
    "llm.c": EngineSpec("llm.c", attention="best", loss_bytes=8.0, grad_bytes=2.0, graphs=True),
    "compiled": EngineSpec("PyTorch, compiled", attention="best", loss_bytes=16.0, grad_bytes=2.0),
    "xla": EngineSpec(
        "XLA on TPUs",
        attention="best",
        tensor_overlap=0.7,
        graphs=True,
        loss_bytes=24.0,
        grad_bytes=2.0,
    ),
    "fairscale": EngineSpec("metaseq, fairscale FSDP", attention="plain", grad_bytes=2.0),
}

_GROUPS = (
    ("Megatron-Bridge", "megatron-bridge"),
    ("Megatron-LM examples/llama", "megatron-lm-example"),
    ("Megatron-LM README model-table", "megatron-core-readme"),
    ("Megatron-LM README strong", "megatron-core-readme"),
    ("Megatron-LM README MFU", "megatron-seqpar"),
    ("Megatron-LM", "megatron-sc21"),
    ("torchtitan", "torchtitan"),
    ("Optimizing Distributed Training on Frontier", "frontier"),
    ("MoE Parallel Folding", "moe-folding"),
    ("Megatron-Core MoE", "megatron-core-moe"),
    ("Vocabulary Parallelism", "vocabulary-parallelism"),
    ("nanotron", "nanotron"),
    ("llm-foundry", "llm-foundry"),
    ("bigscience", "bigscience"),
    ("DeepSpeed", "deepspeed"),
    ("MT-NLG", "mt-nlg"),
    ("PaLM", "palm"),
    ("OPT", "opt"),
    ("llm.c", "llm.c"),
    ("nanochat", "nanochat"),
    ("modded-nanogpt", "modded-nanogpt"),
    ("SimuMax", "simumax"),
    ("MLPerf", "mlperf"),
)
_ENGINE = {
    "megatron-bridge": "bridge",
    "megatron-lm-example": "bridge",
    "megatron-core-readme": "megatron-core",
    "megatron-seqpar": "megatron-2022",
    "megatron-sc21": "megatron-2021",
    "frontier": "megatron-2021",
    "moe-folding": "megatron-core",
    "megatron-core-moe": "megatron-core",
    "vocabulary-parallelism": "megatron-plain",
    "nanotron": "nanotron",
    "llm-foundry": "composer",
    "bigscience": "megatron-2021",
    "deepspeed": "deepspeed",
    "mt-nlg": "megatron-2021",
    "palm": "xla",
    "opt": "fairscale",
    "llm.c": "llm.c",
    "nanochat": "compiled",
    "modded-nanogpt": "compiled",
    "simumax": "megatron-plain",
    "mlperf": "mlperf",
}


def group_of(source: str) -> str:
    """The publication that a row belongs to: all tables of one project are one source."""
    return next((name for start, name in _GROUPS if source.startswith(start)), source[:40])


def engine_of(source: str, row_id: str) -> EngineSpec:
    """The engine of a row."""
    group = group_of(source)
    if group == "torchtitan":
        eager = row_id in ("torchtitan-8b-8-fsdp", "torchtitan-8b-128-fsdp")
        name = "torchtitan" if eager else "torchtitan-compile"
        own = ENGINES[name]
        return replace(own, tensor_overlap=0.5) if "asynctp" in row_id else own
    if group == "megatron-bridge" and not re.search(r"NeMo 26\.0[46]", source):
        return ENGINES["bridge-2025"]
    return ENGINES[_ENGINE[group]]
