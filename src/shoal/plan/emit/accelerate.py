"""Launch files for Accelerate: its YAML configuration and what starts your training script.

Source: Gugger et al., Accelerate, 2022; the keys of Accelerate's configuration (1.15).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from shoal.core.files import to_yaml
from shoal.core.parts import part
from shoal.core.traits import traits
from shoal.ir import ServePlan, TrainPlan
from shoal.plan.emit.shared import (
    accumulation,
    allowed,
    header,
    nodes_of,
    refuses_train,
    script,
)

# Rotation of keys and values by the name that Accelerate has for it.
CONTEXTS = {"zigzag": "alltoall", "all_gather": "allgather"}
PREFIX = "parallelism_config_"

# What it has words for.
EXPRESSES = {
    "shard": ("replicated", "zero1", "zero2", "zero3", "hybrid"),
    "parallel.context": tuple(CONTEXTS),
}


@part
class Accelerate:
    """``accelerate.yaml``, and ``launch.sh`` for a script that uses ``accelerate.Accelerator``."""

    job: ClassVar[Literal["train", "serve"]] = "train"

    def refuses(self, plan: TrainPlan | ServePlan) -> tuple[str, ...]:
        if not isinstance(plan, TrainPlan):
            return ("a serving plan",)
        job, split = plan.job, plan.job.parallel
        result = refuses_train(plan, EXPRESSES)
        if split.pp > 1:
            result.append(f"parallel.pp = {split.pp}: it trains without pipelines; use 1")
        if split.ep > 1:
            result.append(f"parallel.ep = {split.ep}: use 1")
        if split.sp:
            result.append("parallel.sp: its tensor parallelism follows the model's plan; use false")
        mixed = split.tp > 1 or split.cp > 1
        divided = traits("shard", job.shard)
        if mixed and "shards_gradients" not in divided:
            result.append(f"shard = {job.shard.name} with tp or cp > 1: use zero2, zero3 or hybrid")
        if plan.machine.device.kind == "cpu" and (mixed or divided):
            result.append(
                f"shard = {job.shard.name} on {plan.machine.name}: use replicated on CPUs"
            )
        if job.dropout:
            result.append(f"dropout = {job.dropout:g}: the training script decides it; use 0")
        return tuple(result)

    def emit(self, plan: TrainPlan | ServePlan) -> dict[str, str]:
        whole = allowed(plan, TrainPlan, "accelerate", self.refuses(plan))
        job = whole.job
        nodes, _ = nodes_of(whole)
        usage = (
            f"# TRAIN: your script. It makes {job.microbatch or 1} sequences of {job.seq_len} "
            "tokens a forward pass,\n"
            f"# clips gradients at {job.grad_clip:g}, and chooses optimizer and learning rate.\n"
        )
        if nodes > 1:
            usage += "# Usage on node N (from 0): sh launch.sh N ADDRESS_OF_NODE_0\n"
        if job.recompute == "full" and _kind(whole) != "FSDP":
            usage += "# The plan recomputes: call model.gradient_checkpointing_enable() in it.\n"
        before = (
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={accumulation(job)}\n"
            "export ACCELERATE_GRADIENT_ACCUMULATION_STEPS\n"
        )
        words = ['accelerate launch --config_file "$(dirname "$0")/accelerate.yaml"']
        if nodes > 1:
            words.append('--machine_rank "${1:-0}" --main_process_ip "${2:?address of node 0}"')
        words.append('"${TRAIN:?set TRAIN to your training script}"')
        return {
            "accelerate.yaml": header(whole) + to_yaml(_config(whole)),
            "launch.sh": script(header(whole) + usage, words, before=before),
        }


def _kind(plan: TrainPlan) -> str:
    """Accelerate's name for the kind of parallelism."""
    job, split = plan.job, plan.job.parallel
    if split.world == 1:
        return "NO"
    if plan.machine.device.kind == "cpu":
        return "MULTI_CPU"
    return {"replicated": "MULTI_GPU", "zero1": "DEEPSPEED"}.get(job.shard.name, "FSDP")


def _config(plan: TrainPlan) -> dict[str, Any]:
    job, split = plan.job, plan.job.parallel
    nodes, _ = nodes_of(plan)
    kind = _kind(plan)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": "bf16" if job.precision == "bf16" else "no",
        "num_machines": nodes,
        "num_processes": split.world,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "use_cpu": plan.machine.device.kind == "cpu",
        "debug": False,
    }
    if nodes > 1:
        config["main_process_port"] = 29500
    if job.compile:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    if kind == "DEEPSPEED":
        config["deepspeed_config"] = {
            "zero_stage": 1,
            "gradient_accumulation_steps": accumulation(job),
            "gradient_clipping": job.grad_clip,
            "zero3_init_flag": False,
        }
    if kind == "FSDP":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": "shards_weights" in traits("shard", job.shard),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": False,
            "fsdp_activation_checkpointing": job.recompute == "full",
        }
        within = split.dp
        if "copies_weights" in traits("shard", job.shard):
            most = min(split.dp, plan.machine.devices_per_node)
            within = int(job.shard.options.get("within") or most)
        degrees: dict[str, Any] = {
            f"{PREFIX}dp_replicate_size": split.dp // within,
            f"{PREFIX}dp_shard_size": within,
            f"{PREFIX}tp_size": split.tp,
            f"{PREFIX}cp_size": split.cp,
        }
        if split.cp > 1:
            degrees[f"{PREFIX}cp_comm_strategy"] = CONTEXTS[split.context.name]
        config["parallelism_config"] = degrees
    return config
