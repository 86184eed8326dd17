"""Launch files for torchtitan: a configuration in Python and what starts it.

torchtitan 0.3 reads its configuration from a function that a module offers; the fields are
those of its ``Trainer.Config``.

Source: Liang et al., TorchTitan, 2024; the configuration of torchtitan 0.3.0.
"""

from __future__ import annotations

import json
from typing import ClassVar, Literal

from shoal.core.parts import part
from shoal.core.traits import traits
from shoal.cost.price.shares import microbatch_of
from shoal.cost.training.totals import steps_of
from shoal.ir import ServePlan, TrainPlan
from shoal.plan.emit.shared import (
    accumulation,
    adamw,
    allowed,
    even_stages,
    header,
    rate_course,
    refuses_train,
    save_every,
    saves_behind,
    script,
    torchrun,
    warmup_steps,
)

# Name of a shape -> torchtitan's module and its name for the size.
MODELS = {
    "DeepSeek-R1": ("deepseek_v3", "671B"),
    "DeepSeek-V2": ("deepseek_v3", "236B"),
    "DeepSeek-V2-Lite": ("deepseek_v3", "16B"),
    "DeepSeek-V3": ("deepseek_v3", "671B"),
    "Llama-3-70B": ("llama3", "70B"),
    "Llama-3-8B": ("llama3", "8B"),
    "Llama-3.1-405B": ("llama3", "405B"),
    "Llama-3.1-70B": ("llama3", "70B"),
    "Llama-3.1-8B": ("llama3", "8B"),
    "Llama-3.2-1B": ("llama3", "1B"),
    "Llama-3.2-3B": ("llama3", "3B"),
    "Qwen3-0.6B": ("qwen3", "0.6B"),
    "Qwen3-1.7B": ("qwen3", "1.7B"),
    "Qwen3-14B": ("qwen3", "14B"),
    "Qwen3-235B-A22B": ("qwen3", "235B-A22B"),
    "Qwen3-30B-A3B": ("qwen3", "30B-A3B"),
    "Qwen3-32B": ("qwen3", "32B"),
    "Qwen3-4B": ("qwen3", "4B"),
    "Qwen3-8B": ("qwen3", "8B"),
    "gpt-oss-120b": ("gpt_oss", "120b"),
    "gpt-oss-20b": ("gpt_oss", "20b"),
}
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
}
# What it has words for.
EXPRESSES = {
    "shard": ("replicated", "zero2", "zero3", "hybrid"),
    "parallel.schedule": tuple(SCHEDULES),
    "parallel.context": ("zigzag",),
}
# Type of products -> what converts the blocks' linear layers, and its options.
CONVERTERS = {
    "fp8": ("Float8LinearConverter", 'filter_fqns=["lm_head"]'),
    "mxfp8": ("MXFP8LinearConverter", 'fqns=["layers"]'),
}
MODULE = "shoal_plan"


@part
class Torchtitan:
    """``shoal_plan.py``, whose function ``plan`` is the configuration, and ``launch.sh``."""

    job: ClassVar[Literal["train", "serve"]] = "train"

    def refuses(self, plan: TrainPlan | ServePlan) -> tuple[str, ...]:
        if not isinstance(plan, TrainPlan):
            return ("a serving plan",)
        job, split = plan.job, plan.job.parallel
        # Its converters of linear layers leave experts as they are.
        low = () if plan.shape.num_experts else tuple(CONVERTERS)
        result = refuses_train(plan, EXPRESSES, selective=True, products=low, overlaps=("none",))
        divided = traits("shard", job.shard)
        if plan.shape.name not in MODELS:
            result.append(f"model = {plan.shape.name}: it has {', '.join(MODELS)}")
        if plan.machine.device.kind == "cpu":
            result.append(f"machine = {plan.machine.name}: it trains on accelerators")
        if split.etp not in (1, split.tp):
            result.append(f"parallel.etp = {split.etp}: use 1")
        if split.ep > 1 and not divided:
            result.append("parallel.ep with shard = replicated: use zero2 or zero3")
        if split.order != "pp-dp-cp-tp":
            result.append(f"parallel.order = {split.order}: use pp-dp-cp-tp")
        if split.stages and "splits_backward" in traits("schedule", split.schedule):
            result.append("parallel.stages with zbv: leave the stages out")
        if split.pp > 1:
            result += _refuses_pipeline(plan)
        if job.dropout:
            result.append(f"dropout = {job.dropout:g}: use 0")
        return tuple(result)

    def emit(self, plan: TrainPlan | ServePlan) -> dict[str, str]:
        whole = allowed(plan, TrainPlan, "torchtitan", self.refuses(plan))
        words = [*torchrun(whole), f"-m torchtitan.train --module {MODULE} --config plan"]
        before = 'PYTHONPATH="$(dirname "$0")${PYTHONPATH:+:$PYTHONPATH}"\nexport PYTHONPATH\n'
        usage = (
            "# Usage on node N (from 0): sh launch.sh N ADDRESS_OF_NODE_0\n"
            "# ASSETS: the directory of the model's tokenizer and configuration.\n"
            "# DATASET: a data set that torchtitan knows, such as c4.\n"
        )
        return {
            f"{MODULE}.py": _module(whole),
            "launch.sh": script(header(whole) + usage, words, before=before),
        }


def _refuses_pipeline(plan: TrainPlan) -> list[str]:
    """What its pipelines, and the schedules of torch that they use, refuse."""
    split, micros = plan.job.parallel, accumulation(plan.job)
    name = split.schedule.name
    results = []
    if name == "interleaved" and split.vpp == 1:
        results.append("parallel.vpp = 1 with schedule = interleaved: use 1f1b, which is the same")
    if name == "1f1b" and micros < split.pp:
        results.append(f"{micros} micro-batches with schedule = 1f1b: use at least pp = {split.pp}")
    rounds = max(1, micros // split.pp)
    if name == "interleaved" and micros % rounds:
        results.append(
            f"{micros} micro-batches with schedule = interleaved: use a multiple of their "
            f"{rounds} rounds"
        )
    return results


def _divides(layers: int, chunks: int) -> bool:
    """Whether it would cut as many stages, from the blocks that the largest of them has."""
    return -(-layers // -(-layers // chunks)) == chunks


def _module(plan: TrainPlan) -> str:
    job, split, shape = plan.job, plan.job.parallel, plan.shape
    module, flavor = MODELS[shape.name]
    replicate, shard = _data_parallel(plan)
    micro = microbatch_of(job)
    # Without a pipeline a local batch is one forward pass and the rest is accumulated; with
    # one it is cut in micro-batches.
    local = job.global_batch // split.dp if split.pp > 1 else micro
    divided = traits("shard", job.shard)
    gathered = "shards_gradients" in divided and "shards_weights" not in divided
    parallel: dict[str, object] = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "never" if gathered else "always",
        "tensor_parallel_degree": split.tp,
        "enable_sequence_parallel": split.sp,
        "pipeline_parallel_degree": split.pp,
        "context_parallel_degree": split.cp,
        "expert_parallel_degree": split.ep,
    }
    if split.cp > 1:
        parallel["context_parallel_load_balancer"] = "headtail"
    if split.pp > 1:
        parallel["pipeline_parallel_schedule"] = SCHEDULES[split.schedule.name]
        parallel["pipeline_parallel_microbatch_size"] = micro
        chunks = split.pp * split.vpp
        if split.stages or not _divides(shape.num_layers, chunks):
            stages = split.stages or even_stages(shape.num_layers, chunks)
            parallel["module_fqns_per_model_part"] = _stages(stages)
        else:
            parallel["pipeline_parallel_first_stage_less_layers"] = 0
            parallel["pipeline_parallel_last_stage_less_layers"] = 0
            parallel["pipeline_parallel_layers_per_stage"] = -(-shape.num_layers // chunks)
    training: dict[str, object] = {
        "local_batch_size": local,
        "global_batch_size": job.global_batch,
        "seq_len": job.seq_len,
        # Its 0 would clip everything to nothing; ours clips nothing.
        "max_norm": job.grad_clip or 1e9,
        "mixed_precision_param": "bfloat16" if job.precision == "bf16" else "float32",
    }
    if split.pp > 1 or split.ep > 1:
        training["disable_cuda_graphs"] = True  # it captures neither pipelines nor exchanges
    steps = steps_of(job)
    if steps is not None:
        training["steps"] = steps
    own = adamw(job)
    optimizer = {
        "lr": own["lr"],
        "betas": (own["beta1"], own["beta2"]),
        "eps": own["eps"],
        "weight_decay": own["weight_decay"],
    }
    course = rate_course(job)
    rate: dict[str, object] = {"warmup_steps": warmup_steps(job), "min_lr_factor": course["floor"]}
    rate["decay_type"] = "cosine" if course["name"] == "cosine" else "linear"
    if "decay" in course:
        rate["decay_ratio"] = course["decay"]
    every = save_every(plan)
    checkpoint: dict[str, object] = {
        "enable": every > 0,
        "interval": every or steps or 1,
        "async_mode": "async" if saves_behind(plan) else "disabled",
        # It keeps at least two.
        "keep_latest_k": max(2, job.checkpoint.keep),
    }
    recompute, imported = "None", ""
    if job.recompute != "none":
        policy = f"{job.recompute.capitalize()}AC"
        recompute = f"{policy}.Config()"
        imported = f"from torchtitan.distributed.activation_checkpoint import {policy}\n"
    spec, quantised = f'"{flavor}"', ""
    if job.products != "same":
        converter, options = CONVERTERS[job.products]
        options += f", model_compile_enabled={job.compile}"
        spec += f", converters=[{converter}.Config({options})]"
        quantised = f"from torchtitan.components.quantization import {converter}\n"
    return f'''"""{header(plan, mark="").strip()}

For torchtitan 0.3: python -m torchtitan.train --module {MODULE} --config plan
"""

import os

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
{quantised}{imported}from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{module} import model_registry
from torchtitan.trainer import Trainer


def plan() -> Trainer.Config:
    """The planned configuration."""
    spec = model_registry({spec})
    words = decoder_vocab_size(spec)
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=words)),
        hf_assets_path=os.environ.get("ASSETS", "./assets/hf/{shape.name}"),
        dataloader=HuggingFaceTextDataLoader.Config(dataset=os.environ.get("DATASET", "c4")),
        optimizer=default_adamw({_call(optimizer)}),
        lr_scheduler=LRSchedulersContainer.Config({_call(rate)}),
        training=TrainingConfig({_call(training)}),
        parallelism=ParallelismConfig({_call(parallel)}),
        activation_checkpoint={recompute},
        compile=CompileConfig(enable={job.compile}),
        checkpoint=CheckpointManager.Config({_call(checkpoint)}),
        metrics=MetricsProcessor.Config(log_freq={job.log_every}, enable_tensorboard=True),
        debug=DebugConfig(seed={job.seed}),
    )
'''


def _call(options: dict[str, object]) -> str:
    """Keyword arguments, one a line."""
    inner = "".join(f"            {key}={_literal(value)},\n" for key, value in options.items())
    return f"\n{inner}        "


def _literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _data_parallel(plan: TrainPlan) -> tuple[int, int]:
    """(copies of the weights, ranks that share one)."""
    job, split = plan.job, plan.job.parallel
    if not traits("shard", job.shard):
        return split.dp, 1
    if "copies_weights" in traits("shard", job.shard):
        within = job.shard.options.get("within") or min(split.dp, plan.machine.devices_per_node)
        return split.dp // int(within), int(within)
    return 1, split.dp


def _stages(stages: tuple[int, ...]) -> list[list[str]]:
    """Names of the modules of each stage."""
    result, first = [], 0
    for blocks in stages:
        result.append([f"layers.{i}" for i in range(first, first + blocks)])
        first += blocks
    result[0].insert(0, "tok_embeddings")
    result[-1] += ["norm", "lm_head"]
    return result
