"""Launch files for Megatron-LM: the arguments of ``pretrain_gpt.py``.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM, 2021; the arguments of Megatron-LM (core 0.16).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from shoal.core.errors import PlanError
from shoal.core.parts import part
from shoal.core.traits import traits
from shoal.cost.gpu.engines import check_overlap
from shoal.cost.gpu.spec import groups_of
from shoal.cost.latent import latent_of
from shoal.cost.price.experts import spread
from shoal.cost.price.shares import microbatch_of
from shoal.cost.training.totals import steps_of
from shoal.ir import ModelShape, ServePlan, TrainPlan
from shoal.plan.emit.shared import (
    accumulation,
    adamw,
    allowed,
    even_stages,
    header,
    option,
    rate_course,
    refuses_train,
    save_every,
    saves_behind,
    script,
    torchrun,
    warmup_steps,
)

# Attention of these shapes needs more numbers than a shape holds.
ATTENTIONS = ("MHA", "GQA", "MQA")
CONTEXTS = {"zigzag": "p2p", "all_gather": "allgather", "ulysses": "a2a", "usp": "a2a+p2p"}
SHARDING = {"zero2": "optim_grads", "zero3": "optim_grads_params"}
# What it has words for.
EXPRESSES = {
    "shard": ("replicated", "zero1", *SHARDING),
    "parallel.schedule": ("1f1b", "interleaved"),
    "parallel.context": tuple(CONTEXTS),
}
# Order of the axes -> the switch that asks for it.
ORDERS = {"pp-dp-cp-tp": None, "dp-pp-cp-tp": "--use-tp-pp-dp-mapping"}


@part
class Megatron:
    """``launch.sh``, which starts ``pretrain_gpt.py`` with the arguments of the plan."""

    job: ClassVar[Literal["train", "serve"]] = "train"

    def refuses(self, plan: TrainPlan | ServePlan) -> tuple[str, ...]:
        if not isinstance(plan, TrainPlan):
            return ("a serving plan",)
        job, split, shape = plan.job, plan.job.parallel, plan.shape
        # Norms and activation functions run again by themselves in mixtures alone.
        result = refuses_train(
            plan,
            EXPRESSES,
            selective=bool(shape.num_experts),
            products=("fp8", "mxfp8"),
            overlaps=("none", "tile", "experts"),
        )
        try:
            check_overlap(job)
        except PlanError as cause:
            result.append(str(cause))
        if plan.machine.device.kind == "cpu":
            result.append(f"machine = {plan.machine.name}: it trains on GPUs")
        if shape.attention not in ATTENTIONS and not latent_of(shape):
            result.append(
                f"model = {shape.name}: its {shape.attention} attention needs more numbers than "
                "a plan holds"
            )
        micros = accumulation(job)
        if split.vpp > 1 and micros % split.pp:
            result.append(
                f"{micros} micro-batches with parallel.vpp = {split.vpp}: use a multiple of pp = "
                f"{split.pp}"
            )
        if job.shard.name in SHARDING and split.pp > 1:
            result.append(f"shard = {job.shard.name} with pp > 1: use zero1")
        if split.order not in ORDERS:
            result.append(f"parallel.order = {split.order}: use {' or '.join(ORDERS)}")
        if job.compile:
            result.append("compile = true: it has its own fused kernels; use false")
        if split.sp and split.tp == 1:
            result.append("parallel.sp with tp = 1: use false")
        return tuple(result)

    def emit(self, plan: TrainPlan | ServePlan) -> dict[str, str]:
        whole = allowed(plan, TrainPlan, "megatron", self.refuses(plan))
        shape = whole.shape
        arguments = [*_model(shape), *_training(whole), *_parallel(whole), *_data()]
        words = [*torchrun(whole), '"${MEGATRON:-.}/pretrain_gpt.py"', *arguments]
        usage = (
            "# Usage on node N (from 0): sh launch.sh N ADDRESS_OF_NODE_0\n"
            "# MEGATRON: the directory of Megatron-LM. DATA: prefix of an indexed data set.\n"
            "# TOKENIZER: the model's Hugging Face name or directory. SAVE: for checkpoints.\n"
        )
        # One queue of launches lets kernels of communication start beside those that compute;
        # its fully sharded weights, and the passes of two micro-batches at a time, want several.
        queues = 32 if whole.job.parallel.overlap == "experts" else 1
        before = f"CUDA_DEVICE_MAX_CONNECTIONS={queues}\nexport CUDA_DEVICE_MAX_CONNECTIONS\n"
        if whole.job.shard.name in SHARDING:
            before = "unset CUDA_DEVICE_MAX_CONNECTIONS\n"
        return {"launch.sh": script(header(whole) + usage, words, before=before)}


def _model(shape: ModelShape) -> list[str]:
    model = [
        option("--num-layers", shape.num_layers),
        option("--hidden-size", shape.hidden),
        option("--ffn-hidden-size", shape.ffn_hidden),
        option("--num-attention-heads", shape.num_heads),
        option("--kv-channels", shape.head_dim),
        option("--max-position-embeddings", shape.max_position),
        option("--vocab-size", shape.vocab_size),
    ]
    if latent := latent_of(shape):
        model += [
            "--multi-latent-attention",
            option("--kv-lora-rank", latent.kv),
            option("--qk-head-dim", latent.plain),
            option("--qk-pos-emb-head-dim", latent.rotary),
            option("--v-head-dim", latent.value),
            *([option("--q-lora-rank", latent.query)] if latent.query else []),
        ]
    elif shape.num_kv_heads != shape.num_heads:
        model += ["--group-query-attention", option("--num-query-groups", shape.num_kv_heads)]
    if shape.gated:
        model += ["--swiglu", "--disable-bias-linear", option("--normalization", "RMSNorm")]
        model += [option("--position-embedding-type", "rope")]
        base = '"${ROTARY_BASE:?set it to rope_theta of the config.json of the model}"'
        if shape.rope_base is not None:
            base = f"{shape.rope_base:.0f}"
        model.append(f"--rotary-base {base}")
    else:
        model.append(option("--position-embedding-type", "learned_absolute"))
    if shape.attention_bias and shape.gated:
        model.append("--add-qkv-bias")
    if shape.qk_norm:
        model.append("--qk-layernorm")
    if not shape.tied:
        model.append("--untie-embeddings-and-output-weights")
    if shape.num_experts:
        model += [
            option("--num-experts", shape.num_experts),
            option("--moe-router-topk", shape.top_k),
            option("--moe-ffn-hidden-size", shape.expert_hidden),
            "--moe-grouped-gemm",
        ]
        reached, groups = groups_of(shape)
        if groups > 1:
            model += [option("--moe-router-num-groups", groups)]
            model += [option("--moe-router-group-topk", reached)]
        if shape.num_shared_experts:
            width = shape.num_shared_experts * shape.expert_hidden
            model.append(option("--moe-shared-expert-intermediate-size", width))
        if shape.num_dense_layers:
            rest = shape.num_layers - shape.num_dense_layers
            frequency = f"[0]*{shape.num_dense_layers}+[1]*{rest}"
            model.append(option("--moe-layer-freq", frequency))
    return model


def _training(plan: TrainPlan) -> list[str]:
    job = plan.job
    own, course = adamw(job), rate_course(job)
    steps, warm = steps_of(job), warmup_steps(job)
    results = [
        option("--seq-length", job.seq_len),
        option("--micro-batch-size", microbatch_of(job)),
        option("--global-batch-size", job.global_batch),
        option("--optimizer", "adam"),
        option("--lr", own["lr"]),
        option("--min-lr", own["lr"] * float(course["floor"])),
        option("--adam-beta1", own["beta1"]),
        option("--adam-beta2", own["beta2"]),
        option("--adam-eps", own["eps"]),
        option("--weight-decay", own["weight_decay"]),
        option("--clip-grad", job.grad_clip),
        option("--hidden-dropout", job.dropout),
        option("--attention-dropout", 0.0),
        option("--seed", job.seed + 1),  # it wants one above 0
    ]
    if course["name"] == "wsd":
        results += [option("--lr-decay-style", "WSD"), option("--lr-wsd-decay-style", "linear")]
        if steps is not None:
            results.append(option("--lr-wsd-decay-iters", round(float(course["decay"]) * steps)))
    else:
        results.append(option("--lr-decay-style", "cosine"))
    if steps is not None:
        results += [option("--train-iters", steps), option("--lr-decay-iters", steps)]
        results.append(option("--lr-warmup-iters", warm))
    if job.precision == "bf16":
        results.append("--bf16")
    if job.products != "same":
        recipe = {"fp8": "tensorwise", "mxfp8": "mxfp8"}[job.products]
        results += [option("--fp8-format", "hybrid" if recipe == "tensorwise" else "e4m3")]
        results += [option("--fp8-recipe", recipe)]
    if job.recompute == "selective":
        results.append(option("--recompute-granularity", "selective"))
        up = " mla_up_proj" if latent_of(plan.shape) else ""
        results.append("--recompute-modules layernorm moe_act" + up)
    if job.recompute == "full":
        results += [
            option("--recompute-granularity", "full"),
            option("--recompute-method", "uniform"),
            option("--recompute-num-layers", 1),
        ]
    results += [option("--log-interval", job.log_every), "--log-throughput"]
    every = save_every(plan)
    if every:
        results.append(option("--save-interval", every))
    if saves_behind(plan):
        results.append("--async-save")
    return results


def _parallel(plan: TrainPlan) -> list[str]:
    job, split, shape = plan.job, plan.job.parallel, plan.shape
    results = [
        option("--tensor-model-parallel-size", split.tp),
        option("--pipeline-model-parallel-size", split.pp),
    ]
    if split.cp > 1:
        results.append(option("--context-parallel-size", split.cp))
        results.append(option("--cp-comm-type", CONTEXTS[split.context.name]))
    if split.cp > 1 and CONTEXTS[split.context.name] == "a2a+p2p":
        within = int(split.context.options.get("ulysses", 2))
        results.append(f"--hierarchical-context-parallel-sizes {within} {split.cp // within}")
    if shape.num_experts:
        results.append(option("--expert-model-parallel-size", split.ep))
        results.append(option("--expert-tensor-parallel-size", split.etp))
        # Tokens cross once to a node, where experts lie on several.
        far = spread(plan.machine, split)
        results.append(option("--moe-token-dispatcher-type", "flex" if far else "alltoall"))
        if far:
            results.append(option("--moe-flex-dispatcher-backend", "hybridep"))
        if split.overlap == "experts":
            results += ["--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"]
    if split.sp:
        results.append("--sequence-parallel")
    chunks = split.pp * split.vpp
    if split.stages or shape.num_layers % chunks:
        stages = split.stages or even_stages(shape.num_layers, chunks)
        results.append(option("--pipeline-model-parallel-layout", _layout(stages)))
    elif split.vpp > 1:
        results.append(option("--num-virtual-stages-per-pipeline-rank", split.vpp))
    order = ORDERS[split.order]
    results += [] if order is None else [order]
    divided = traits("shard", job.shard)
    if "shards_optimizer" in divided and "shards_gradients" not in divided:
        results += [
            "--use-distributed-optimizer",
            "--overlap-grad-reduce",
            "--overlap-param-gather",
        ]
    elif job.shard.name in SHARDING:
        results += [
            "--use-megatron-fsdp",
            "--use-distributed-optimizer",
            option("--data-parallel-sharding-strategy", SHARDING[job.shard.name]),
            "--no-gradient-accumulation-fusion",
            option("--ckpt-format", "fsdp_dtensor"),
        ]
    elif split.dp > 1:
        results.append("--overlap-grad-reduce")
    return results


def _layout(stages: tuple[int, ...]) -> str:
    """Megatron's spelling: E embeds, t is a block, L is the loss, | parts stages."""
    words = [f"t*{blocks}" for blocks in stages]
    words[0] = "E" + words[0]
    words[-1] += "L"
    return "|".join(words)


def _data() -> list[str]:
    return [
        '--data-path "${DATA:?set DATA to the prefix of an indexed data set}"',
        '--tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:?set TOKENIZER}"',
        '--save "${SAVE:-checkpoints}" --load "${SAVE:-checkpoints}"',
    ]
