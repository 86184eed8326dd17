"""Which trainings have recorded losses: one row for each part that training can be made of.

A row is what differs from :data:`JOB` and :data:`MODEL`. Its name says the table of the part, the
part, and what else is special about it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shoal.core.parts import table
from shoal.core.traits import traits

STEPS = 20

JOB: dict[str, Any] = {
    "model": "shoal-0.3m",
    "seq_len": 16,
    "global_batch": 4,
    "microbatch": 1,
    "steps": STEPS,
    "threads": 1,
    "precision": "fp32",
    "grad_clip": 0.5,
    "optimizer": {"name": "adamw", "lr": 1e-2},
}

MODEL: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 48,
    "hidden": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "ffn_hidden": 24,
    "max_position": 64,
}

DEEP: dict[str, Any] = {"num_layers": 4}
EXPERTS: dict[str, Any] = {"family": "mixtral", "num_experts": 4, "top_k": 2}

KINDS = (
    "schedule", "context", "shard", "sync", "offload", "activation", "optimizer", "lr_schedule",
    "packing", "assigner", "placer", "gate", "peft", "drafter",
)  # fmt: skip
"""Every part of these kinds has a row."""


class Row(NamedTuple):
    """A training of :data:`STEPS` steps.

    Args:
        job: what differs from :data:`JOB`.
        model: what differs from :data:`MODEL`.
        dtypes: of the weights, and of the computation where the job's precision is fp32.
        nodes: ranks of one emulated node; all on one if not given.
    """

    job: dict[str, Any]
    model: dict[str, Any] = {}
    dtypes: tuple[str, ...] = ("fp64", "fp32")
    nodes: int | None = None


def _split(model: dict[str, Any] | None = None, /, **parallel: Any) -> Row:
    """Of two micro-batches on a rank; of four, where they go through a pipeline."""
    few = {} if {"dp", "pp"} & parallel.keys() else {"global_batch": 2}
    return Row({"parallel": parallel, **few}, model or {})


def _with(row: Row, **changes: Any) -> Row:
    return row._replace(job={**row.job, **changes})


FP32 = ("fp32",)
DP2 = _split(dp=2)
DP4 = _split(dp=4)
ALONE = Row({"microbatch": 2})
WIDE = {"num_kv_heads": 4}


def _plain() -> dict[str, Row]:
    """One rank: precision, dropout, recomputation, learning rate, optimizers, architectures."""
    rows = {
        "alone": ALONE,
        "alone tied": ALONE._replace(model={"tied": True}),
        "alone bf16": _with(ALONE, precision="bf16")._replace(dtypes=FP32),
        "alone dropout": _with(ALONE, dropout=0.1),
        "alone no clip": _with(ALONE, grad_clip=0.0),
        "alone recompute full": _with(ALONE, recompute="full", dropout=0.1),
        "alone recompute stage": _with(ALONE, recompute="stage"),
        "alone recompute of one layer": _with(
            ALONE, layers=[{"blocks": 1, "recompute": "full"}, {"blocks": 1}]
        ),
        "alone masked diffusion": ALONE._replace(model={"family": "mdlm", "mask_token_id": 47}),
        "alone qwen3": ALONE._replace(model={"family": "qwen3", "qk_norm": True}),
        "alone parallel blocks": ALONE._replace(model={"family": "parallel"}),
        "alone ladder": ALONE._replace(model={"architecture": {"residual": "ladder"}}),
        "alone desync": ALONE._replace(model={"architecture": {"residual": "desync"}}),
        "alone streams": ALONE._replace(
            model={"architecture": {"streams": {"num": 2, "prefix": 2}}}
        ),
        "alone duo": ALONE._replace(model={"architecture": {"ffn": "duo"}}),
    }
    rows |= {f"lr_schedule {name}": _with(ALONE, lr_schedule=name) for name in ("cosine", "wsd")}
    for name, lr in (("adamw", 1e-2), ("lamb", 1e-2), ("muon", 3e-3)):
        part = {"name": name, "lr": lr}
        rows[f"optimizer {name}"] = _with(ALONE, optimizer=part)
        rows[f"optimizer {name} dp2 zero1"] = _with(DP2, optimizer=part, shard="zero1")
    rows["optimizer adamw not fused"] = _with(
        ALONE, optimizer={"name": "adamw", "lr": 1e-2, "fused": False}
    )
    for name in ("stream", "document", "padded", "best_fit"):
        rows[f"packing {name}"] = _with(ALONE, packing=name)
        rows[f"packing {name} dp2"] = _with(DP2, packing=name)
    return rows


def _splits() -> dict[str, Row]:
    """Tensor, pipeline and context parallelism, and what goes with them."""
    rows = {
        "tp2": _split(tp=2),
        "tp2 sp": _split(tp=2, sp=True),
        "tp2 vocab none": _split(tp=2, vocab="none"),
        "tp2 overlap": _split(tp=2, sp=True, overlap="tile"),
        "tp2 dropout recompute": _with(_split(tp=2, sp=True), dropout=0.1, recompute="full"),
        "tp2 bf16": _with(_split(tp=2, sp=True), precision="bf16")._replace(dtypes=FP32),
        "tp2 ladder": _split({"architecture": {"residual": "ladder"}}, tp=2),
        "tp2 desync": _split({"architecture": {"residual": "desync"}}, tp=2),
        "tp4 sp": _split(WIDE, tp=4, sp=True),
        "tp2 dp2 zero2": _with(_split(tp=2, dp=2), shard="zero2"),
        "pp2 tied": _split({"tied": True}, pp=2),
        "pp2 bf16": _with(_split(pp=2), precision="bf16")._replace(dtypes=FP32),
        "pp2 dropout recompute stage": _with(_split(pp=2), dropout=0.1, recompute="stage"),
        "pp2 documents": _with(_split(pp=2), packing="document"),
        "pp2 vocab pp": _split(pp=2, vocab="pp"),
        "pp2 vocab pp twice": _split(DEEP, pp=2, vpp=2, schedule="vhalf", vocab="pp",
                                     vocab_barriers=2),
        "pp2 stages given": _split(DEEP, pp=2, stages=[1, 3]),
        "pp2 tp2 scatter": _split(tp=2, pp=2, sp=True),
        "pp2 tp2 no scatter": _split(tp=2, pp=2, scatter_gather=False),
        "pp2 dp2 zero1": _with(_split(pp=2, dp=2), shard="zero1"),
        "pp2 dp2 zero3": _with(_split(pp=2, dp=2), shard="zero3"),
        "pp2 cp2": _split(pp=2, cp=2),
        "pp4": _split(DEEP, pp=4),
        "tp2 cp2": _split(tp=2, cp=2, sp=True),
        "cp2 dp2 zero3": _with(_split(cp=2, dp=2), shard="zero3"),
        "cp2 documents": _with(_split(cp=2), packing="document"),
        "cp2 dropout recompute": _with(_split(cp=2), dropout=0.1, recompute="full"),
    }  # fmt: skip
    for name in table("schedule"):
        two = "several_stages" in traits("schedule", name)
        model = DEEP if two else {}
        rows[f"schedule {name}"] = _split(model, pp=2, schedule=name, vpp=2 if two else 1)
    skips = {"name": "skippipe", "keep": 2, "effort": 5}
    rows["schedule skippipe skipping"] = _split(DEEP, pp=3, schedule=skips)
    rows["schedule skippipe replicas"] = _split(DEEP, pp=3, schedule={**skips, "of": 2})
    for name in table("context"):
        big = name in ("usp", "double_ring")
        rows[f"context {name}"] = _split(cp=4 if big else 2, context=name)
    return rows


def _state() -> dict[str, Row]:
    """What is sharded, how often ranks agree, what is offloaded or kept elsewhere."""
    rows = {}
    for name in ("replicated", "zero1", "zero2", "zero3"):
        rows[f"shard {name}"] = _with(DP2, shard=name)
        rows[f"shard {name} dp4"] = _with(DP4, shard=name)
        rows[f"shard {name} bf16"] = _with(DP2, shard=name, precision="bf16")._replace(dtypes=FP32)
    rows["shard zero3 recompute"] = _with(DP2, shard="zero3", recompute="full", dropout=0.1)
    rows["shard hybrid"] = _with(DP4, shard={"name": "hybrid", "within": 2})
    rows["shard topo3"] = _with(DP4, shard={"name": "topo3", "levels": [1, 2]})
    rows["shard topo3 nodes"] = _with(DP4, shard="topo3")._replace(nodes=2)
    rows["shard topo3 quantised"] = _with(
        DP4,
        shard={
            "name": "topo3",
            "levels": [2, 2],
            "quant": {"weights": "int8", "grads": "int4"},
        },
    )._replace(dtypes=FP32)
    for name, options in (
        ("every_step", {}),
        ("local_sgd", {"tau": 4}),
        ("diloco", {"tau": 4}),
        ("co2", {"tau": 4}),
    ):
        rows[f"sync {name}"] = _with(DP2, sync={"name": name, **options})
    rows["sync diloco sharded"] = _with(DP2, sync={"name": "diloco", "tau": 4, "sharded": True})
    rows["sync co2 sharded"] = _with(DP2, sync={"name": "co2", "tau": 4, "sharded": True})
    rows["sync diloco tp2"] = _with(_split(dp=2, tp=2), sync={"name": "diloco", "tau": 4})
    small = {"sub_group_numel": 2**14}
    stream = {"name": "zero_infinity", "device_budget": "8MiB", "host_budget": "64MiB", **small}
    window = {"name": "superpipeline", "k": 2, "k_prime": 1, "device_budget": "8MiB"}
    deep = {"name": "deep_optimizer_states", "sub_group_numel": 1000, "stride": 2}
    fuyou = {"name": "fuyou", "device_budget": "64MiB", "host_budget": "64MiB", "swap": "all"}
    rows |= {
        "offload zero_infinity": _with(ALONE, offload=stream),
        "offload zero_infinity host": _with(
            ALONE, offload={**stream, "param": "host", "optim": "host", "act": "host"}
        ),
        "offload zero_infinity dp2": _with(DP2, offload=stream),
        "offload zero_infinity owner": _with(DP2, offload={**stream, "placement": "owner"}),
        "offload zero_infinity tiles": _with(ALONE, offload={**stream, "tiling": 2}),
        "offload superpipeline": _with(ALONE, offload=window)._replace(model=DEEP),
        "offload superpipeline dp2": _with(DP2, offload=window)._replace(model=DEEP),
        "offload deep_optimizer_states": _with(ALONE, offload=deep),
        "offload deep_optimizer_states dp2": _with(DP2, offload=deep),
        # Its process takes seconds to start.
        "offload fuyou": _with(ALONE, offload=fuyou, grad_clip=0.0)._replace(dtypes=FP32),
    }
    kept = {"name": "ssdtrain", "adaptive": False, "min_bytes": 256}
    rows |= {
        "activation keep": _with(ALONE, activation="keep")._replace(model=DEEP),
        "activation ssdtrain": _with(ALONE, activation=kept)._replace(model=DEEP),
        "activation ssdtrain recompute": _with(ALONE, activation=kept, recompute="full")._replace(
            model=DEEP
        ),
        "activation ssdtrain zero3": _with(DP2, activation=kept, shard="zero3")._replace(
            model=DEEP
        ),
        "activation ssdtrain pp2": _with(_split(DEEP, pp=2), activation=kept),
    }
    return rows


def _experts() -> dict[str, Row]:
    """Mixtures of experts, and sequences that are distributed."""
    rows = {
        "moe": ALONE._replace(model=EXPERTS),
        "moe dp2": DP2._replace(model=EXPERTS),
        "moe tp2": _split(EXPERTS, tp=2),
        "moe ep2": _split(EXPERTS, dp=2, ep=2),
        "moe ep2 bf16": _with(_split(EXPERTS, dp=2, ep=2), precision="bf16")._replace(dtypes=FP32),
        "moe ep2 zero1": _with(_split(EXPERTS, dp=2, ep=2), shard="zero1"),
        "moe ep2 zero3": _with(_split(EXPERTS, dp=2, ep=2), shard="zero3"),
        "moe ep2 recompute dropout": _with(
            _split(EXPERTS, dp=2, ep=2), recompute="full", dropout=0.1
        ),
        "moe ep2 chunks": _split(EXPERTS, dp=2, ep=2, expert_chunks=[3, 2]),
        "moe ep2 slices": _split(EXPERTS, dp=2, ep=2, gradient_slices=[4000, 1000]),
        "moe etp2": _split(EXPERTS, dp=2, etp=2),
        "moe ep2 etp2": _split(EXPERTS, dp=4, ep=2, etp=2),
        "moe ep4 chunks slices 1dh": _split(
            EXPERTS, dp=4, ep=4, expert_dispatch="1dh", expert_chunks=2, gradient_slices=[500, 500]
        )._replace(nodes=2),
        "moe ep4 2dh": _split(EXPERTS, dp=4, ep=4, expert_dispatch="2dh")._replace(nodes=2),
        "moe ep2 tp2": _split(EXPERTS, dp=2, tp=2, sp=True, ep=2, fold=False),
        "moe ep2 cp2": _split(EXPERTS, dp=2, cp=2, ep=2),
        "moe ep2 pp2": _split(EXPERTS, dp=2, pp=2, ep=2),
        "moe pp2 zb_h1": _split(EXPERTS, pp=2, schedule="zb_h1"),
        "placer owners": _split(EXPERTS, dp=2, ep=2, placer="owners"),
        "placer fssdp": _split(
            EXPERTS, dp=2, ep=2, placer={"name": "fssdp", "slots": 1, "resharding_every": 4}
        ),
        "placer fssdp zero1": _with(
            _split(EXPERTS, dp=4, ep=4, placer={"name": "fssdp", "slots": 1,
                                                "resharding_every": 4}),
            shard="zero1",
        ),
    }  # fmt: skip
    for name in table("gate"):
        top = {"switch": 1}.get(name, 2)
        routing: dict[str, Any] = {"gate": name, "z_loss": 1e-3}
        if name != "expert_choice":
            routing |= {"aux_loss": 1e-2, "capacity_factor": 1.0}
        model = {**EXPERTS, "top_k": top, "architecture": {"moe": routing}}
        rows[f"gate {name}"] = ALONE._replace(model=model)
        rows[f"gate {name} ep2"] = _split(model, dp=2, ep=2)
    local = {"moe": {"capacity_factor": 1.0, "scope": "sub-sequence"}}
    rows["gate softmax local capacity"] = _split({**EXPERTS, "architecture": local}, dp=2, ep=2)
    for name, options in (
        ("packed", {"cp": 2}),
        ("bytescale", {}),
        ("flexsp", {}),
    ):
        assigned = {"name": name, "capacity_tokens": 32, **options}
        rows[f"assigner {name}"] = _with(DP2, batching=assigned, packing="document", seq_len=32)
    rows["assigner bytescale zero1"] = _with(
        DP2,
        batching={"name": "bytescale", "capacity_tokens": 12},
        packing="document",
        shard="zero1",
        recompute="full",
    )
    return rows


def _tuned() -> dict[str, Row]:
    """Every method of fine-tuning, of fresh weights."""
    options: dict[str, dict[str, Any]] = {
        "adapter_drop": {"drop": 1},
        "offsite": {"last": 0, "keep": 0.0},
        "streams": {"num": 2, "prefix": 2},
        "adalora": {"r": 4, "target": 2},
    }
    rows = {
        f"peft {name}": _with(ALONE, finetune={"name": name, **options.get(name, {})})
        for name in table("peft")
    }
    for name in ("lora", "adalora", "mezo", "fishmask"):
        part = {"name": name, **options.get(name, {})}
        rows[f"peft {name} dp2"] = _with(DP2, finetune=part)
    return rows


_BOTH = {"alone", "alone tied", "alone dropout", "tp2", "tp2 sp", "moe", "moe ep2", "moe etp2"}


def _rows() -> dict[str, Row]:
    """All of them: parts by themselves in both types, what else is special in the first alone."""
    rows = {**_plain(), **_splits(), **_state(), **_experts(), **_tuned()}
    both = _BOTH | {f"{kind} {part}" for kind in KINDS for part in table(kind)}
    return {n: r if n in both else r._replace(dtypes=r.dtypes[:1]) for n, r in rows.items()}


ROWS = _rows()

DRAFTERS: dict[str, dict[str, Any]] = {
    "medusa": {"heads": 2},
    "medusa 2": {"name": "medusa", "heads": 2, "version": 2, "warmup": 0.25},
    "falcon": {"k": 2, "forwards": 2},
    "ppd": {},
    "dovetail": {"layers": 1, "depth": 2},
}
"""Drafters that are trained; the name is the part's, if no other is given."""

# Rows that are trained by as many processes as well, where FSDP2 shards and autograd has threads.
PROCESSES: dict[int, tuple[str, ...]] = {
    2: (
        "tp2 sp",
        "pp2 documents",
        "schedule zb_h1",
        "context zigzag",
        "moe ep2 chunks",
        "shard replicated",
        "shard zero1",
        "shard zero2",
        "shard zero3",
        "shard zero3 recompute",
        "sync co2",
        "assigner bytescale",
        "peft lora dp2",
    ),
    4: ("shard hybrid", "pp2 dp2 zero3"),
}

TOLERANCE = {"fp64": 1e-5, "fp32": 2e-3}
"""Relative, on another kind of CPU; some gradient norms are summed in fp32."""

# Part of a row's name -> what it needs instead, because it rounds to less than its type has and
# then learns from what was rounded. Measured between SSE 4.1, AVX2 and AVX-512, times ten or more.
LOOSE = {
    "bf16": 5e-3,
    "topo3 quantised": 1e-2,  # gradients of 4 bits
    "optimizer muon": 2e-3,  # iterates in bf16
    "gate xmoe fp32": 0.5,  # a gradient norm above 100: which expert is chosen hangs on rounding
    "peft mezo fp32": 1e-2,  # divides a difference of two losses by 1e-3
}


def tolerance_of(name: str, dtype: str) -> float:
    """Of a row's numbers."""
    return next((v for k, v in LOOSE.items() if k in f"{name} {dtype}"), TOLERANCE[dtype])
