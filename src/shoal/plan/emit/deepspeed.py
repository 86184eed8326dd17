"""Launch files for DeepSpeed: ``ds_config.json`` and what starts your training script.

Source: Rasley et al., DeepSpeed, 2020; Rajbhandari et al., ZeRO, 2020; the keys of DeepSpeed's
configuration (0.19).
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from shoal.core.parts import part
from shoal.cost.price.shares import microbatch_of
from shoal.cost.training.totals import steps_of
from shoal.ir import ServePlan, TrainPlan
from shoal.plan.emit.shared import (
    accumulation,
    adamw,
    allowed,
    header,
    nodes_of,
    rate_course,
    refuses_train,
    script,
    warmup_steps,
)

STAGES = {"replicated": 0, "zero1": 1, "zero2": 2, "zero3": 3}


@part
class DeepSpeed:
    """``ds_config.json``, and ``launch.sh`` for a script that takes ``--deepspeed_config``."""

    job: ClassVar[Literal["train", "serve"]] = "train"

    def refuses(self, plan: TrainPlan | ServePlan) -> tuple[str, ...]:
        if not isinstance(plan, TrainPlan):
            return ("a serving plan",)
        job, split = plan.job, plan.job.parallel
        result = refuses_train(plan, {"shard": tuple(STAGES)})
        if plan.machine.device.kind == "cpu":
            result.append(f"machine = {plan.machine.name}: it trains on accelerators")
        if split.pp > 1:
            result.append(f"parallel.pp = {split.pp}: its pipelines are written in code; use 1")
        if split.ep > 1:
            result.append(f"parallel.ep = {split.ep}: its experts are written in code; use 1")
        if split.sp:
            result.append("parallel.sp: its tensor parallelism keeps whole sequences; use false")
        if job.dropout:
            result.append(f"dropout = {job.dropout:g}: the training script decides it; use 0")
        if job.compile:
            result.append("compile = true: the training script decides it; use false")
        return tuple(result)

    def emit(self, plan: TrainPlan | ServePlan) -> dict[str, str]:
        whole = allowed(plan, TrainPlan, "deepspeed", self.refuses(plan))
        nodes, ranks = nodes_of(whole)
        seq_len = whole.job.seq_len
        usage = (
            "# TRAIN: your script. It reads --deepspeed_config, makes sequences of "
            f"{seq_len} tokens,\n# and calls deepspeed.initialize. HOSTS: its hostfile.\n"
        )
        if whole.job.recompute == "full":
            usage += "# The plan recomputes: call model.gradient_checkpointing_enable() in it.\n"
        words = ["deepspeed"]
        if nodes > 1:
            words.append(f'--hostfile "${{HOSTS:-hostfile}}" --num_nodes {nodes}')
        words += [
            f"--num_gpus {ranks}",
            '"${TRAIN:?set TRAIN to your training script}"',
            '--deepspeed --deepspeed_config "$(dirname "$0")/ds_config.json" "$@"',
        ]
        return {
            "ds_config.json": json.dumps(_config(whole), indent=2) + "\n",
            "launch.sh": script(header(whole) + usage, words),
        }


def _config(plan: TrainPlan) -> dict[str, Any]:
    job, split = plan.job, plan.job.parallel
    own, stage = adamw(job), STAGES[job.shard.name]
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if stage in (1, 2):
        zero["reduce_scatter"] = True
    config: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": microbatch_of(job),
        "gradient_accumulation_steps": accumulation(job),
        "gradient_clipping": job.grad_clip,
        "steps_per_print": job.log_every,
        "wall_clock_breakdown": True,
        "zero_optimization": zero,
        "bf16": {"enabled": job.precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": own["lr"],
                "betas": [own["beta1"], own["beta2"]],
                "eps": own["eps"],
                "weight_decay": own["weight_decay"],
            },
        },
    }
    steps = steps_of(job)
    if steps is not None and rate_course(job)["name"] == "cosine":
        config["scheduler"] = {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": steps,
                "warmup_num_steps": max(2, warmup_steps(job)),
                "cos_min_ratio": rate_course(job)["floor"],
            },
        }
    if split.tp > 1:
        config["tensor_parallel"] = {"autotp_size": split.tp}
    return config
