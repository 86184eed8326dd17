"""From a serving job to an engine that is ready."""

from __future__ import annotations

import atexit
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import ServeError, require
from shoal.core.measure import num_cores
from shoal.core.parts import load_object, table
from shoal.core.sizes import human_bytes
from shoal.core.traits import traits
from shoal.ir import (
    CompactingKVManager,
    HostLink,
    KVManager,
    KVPart,
    PhasePart,
    PreemptPart,
    SchedulerLimits,
    SchedulerPart,
    ServeJob,
    StepCost,
)
from shoal.kernel.calls import Device, LinearCall, PagedAttentionCall
from shoal.kernel.dispatch import dispatch
from shoal.kernel.kv.bfp import BfpKVFormat
from shoal.kernel.protocols import Ready
from shoal.kernel.tensors import name_of
from shoal.kernel.threads import torch_threads
from shoal.machine.host import memory_available
from shoal.model import huggingface
from shoal.model.accelerate import accelerate
from shoal.model.architecture import plain
from shoal.model.config import ModelConfig
from shoal.model.ksort import ksort
from shoal.model.parscale import heads_of
from shoal.model.quantize.layers import pack
from shoal.model.transformer import Transformer
from shoal.plan.serving.memory import slot_length
from shoal.serve.bench.profile import quick_cost, warm
from shoal.serve.cache.paged import PagedCache, Zeros, token_bytes
from shoal.serve.cache.weights import MemoryPart
from shoal.serve.decode.build import speculate, speculative_runner
from shoal.serve.decode.protocols import DecodePart
from shoal.serve.decode.runner import SpeculativeRunner
from shoal.serve.engine.loop import Engine
from shoal.serve.engine.runner import LocalRunner
from shoal.train.allocator import keep_freed_memory

DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}

# Of the memory that is free once the weights are there. The rest is for activations and
# for other processes.
_CACHE_SHARE = 0.5

_CPU = torch.device("cpu")

# Bytes of the cache that have memory soon after the start.
_POPULATED = 1 << 30

# Sequences, and tokens of each, whose keys give the sizes of channels.
_KEY_SAMPLES, _KEY_TOKENS = 4, 256


def load_model(job: ServeJob, device: Device = "cpu") -> Transformer:
    """The model of a job, in its precision, ready to serve on a device.

    Raises:
        ModelError: its directory cannot be read.
        ServeError: its weights are in a precision that is not served.
    """
    with torch_threads(_loading_threads(job)):
        model = huggingface.read(Path(job.model), DTYPES[job.precision])
    return prepare(job, model if device == "cpu" else model.to(device))


def computes_on(job: ServeJob) -> Device:
    """Where the engine of a job computes in one process: on the GPU of this host, if it has one.

    What decodes by guesses or in blocks, packs its weights or moves them computes on the CPU.
    """
    plain = job.speculative is None and job.weights == "plain" and job.parallel.world == 1
    plain = plain and "token_by_token" in traits("decode", job.decode)
    plain = plain and "weights_stay" in traits("memory", job.memory)
    return "cuda" if plain and torch.cuda.is_available() else "cpu"


def _free_bytes(device: torch.device) -> int:
    """Memory that is free where the cache will be."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return memory_available()


def _loading_threads(job: ServeJob) -> int:
    """All cores, shared with the others that load: nothing is computed yet."""
    return max(1, num_cores() // (job.parallel.world * job.replicas))


def prepare(job: ServeJob, model: Transformer) -> Transformer:
    """A model in the precision of the job; sets threads and allocator of this process.

    Raises:
        ServeError: its weights are in a precision that is not served.
    """
    torch.set_num_threads(job.threads_of(num_cores()))
    keep_freed_memory()
    wanted = DTYPES[job.precision]
    if wanted is not None:
        model = model.to(wanted)
    dtype = model.embed.weight.dtype
    require(
        dtype in DTYPES.values(),
        "precision",
        job.precision,
        expected=f"fp32 or bf16; the weights of {job.model} are {dtype}",
        hint="give one of them",
        error=ServeError,
    )
    model = model.requires_grad_(False).eval()
    form = table("kv_format").build(job.kv_format, where="kv_format")
    if isinstance(form, BfpKVFormat) and form.ksort != "none":
        tokens_BT = _calibration(job, model) if form.by == "calibration" else None
        model = ksort(model, by=form.by, mode=form.ksort, tokens_BT=tokens_BT)
    if job.weights != "plain":
        model = pack(model, job.weights)
    few_rows = dispatch(LinearCall(1, 64, 64, name_of(dtype), _device(model)))
    if dtype == torch.float32 and few_rows.backend == "torch" and not model.embed.weight.is_cuda:
        _store_by_columns(model)
    memory: MemoryPart = table("memory").build(job.memory, where="memory")
    placed = traits("memory", job.memory)
    if "weights_stay" not in placed:  # blocks come when their turn is, one by one
        plain(model.config, f"memory = {job.memory.name}")
    if "moves_weights" in placed:  # kernels hold weights, and these come and go
        require(
            not job.kernel and not job.exact and job.weights == "plain",
            "memory",
            job.memory.name,
            expected="resident with kernel, exact or weights: blocks that come and go compute with "
            "the library's operators",
            error=ServeError,
        )
    else:
        with torch_threads(_loading_threads(job)):
            model = accelerate(
                model,
                job.kernel,
                positions=positions(job, model.config),
                exact=job.exact,
                pack="weights_stay" in placed,
                # Between gates and what they gate, streams that are apart give up what is not
                # theirs.
                gates=not job.room_for_adapters and model.config.architecture.residual.apart == 1,
            )
    memory.apply(model)
    return model


def _calibration(job: ServeJob, model: Transformer) -> torch.Tensor:
    """Text whose keys give the sizes of channels: Python's standard library, int64 [B, T].

    Raises:
        ServeError: the model has no tokenizer to read it with.
    """
    from shoal.corpora.tokens import prepare as tokens_of
    from shoal.train.quantize import calibration

    tokenizer = Path(job.model, "tokenizer.json")
    require(
        tokenizer.is_file(),
        "kv_format.bfp.by",
        "calibration",
        expected=f"a model with a tokenizer, and there is no {tokenizer}",
        hint="copy the model's own there, or sort with by: weight",
        error=ServeError,
    )
    vocab, length = model.config.vocab_size, min(_KEY_TOKENS, model.config.max_position)
    text = tokens_of("stdlib", str(tokenizer), vocab).train
    return calibration(text, samples=_KEY_SAMPLES, length=length, vocab_size=vocab)


def _device(model: Transformer) -> Device:
    return "cuda" if model.embed.weight.is_cuda else "cpu"


def attention_kernel(
    job: ServeJob, model: Transformer, cache: PagedCache, *, prompts: bool = False
) -> Ready | None:
    """The kernel of ``paged_attention`` for the requests of a job; None if pages are copied.

    Args:
        job: what to do.
        model: computes the queries.
        cache: holds what they see.
        prompts: for chunks of prompts, not for single tokens.

    Raises:
        KernelError: the job wants one that does not exist, or that cannot read this cache.
    """
    wanted = job.kernel.get("paged_attention")
    if model.config.architecture.streams.num > 1:  # no kernel reads a prefix before the pages
        require(
            wanted in (None, "torch") and not job.exact,
            "kernel.paged_attention",
            wanted or "exact",
            expected="torch, without exact, for a model with streams: pages are copied",
            error=ServeError,
        )
        return None
    if prompts and (job.exact or wanted is not None):
        return None
    config = model.config
    context = positions(job, config) // 2
    call = PagedAttentionCall(
        tree=job.speculative is not None and not prompts,
        batch=1 if prompts else job.max_running,
        context=context,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=cache.block_size,
        dtype=name_of(cache.dtype),
        format=str(cache.form),
        device="cuda" if cache.device.type == "cuda" else "cpu",
        queries=min(context, job.max_step_tokens) if prompts else 1,
    )
    kernel = dispatch(call, wanted=wanted, exact=job.exact)
    # Copying pages is what `torch` means, and the engine does it for all requests of a step.
    # For many queries what is made for one is no gain over that.
    if kernel.backend == "torch" or (prompts and kernel.backend == "cpp"):
        return None
    return kernel.prepare(call)


def _store_by_columns(model: Transformer) -> None:
    """Keep the values of every matrix, and change the order in which they lie in memory.

    The library's fp32 product of a few rows with a matrix stored by columns takes half to
    all of the time of one stored by rows, and never more; in bf16 it is the other way round.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            by_columns = module.weight.t().contiguous().t()
            module.weight = torch.nn.Parameter(by_columns, requires_grad=False)


def positions(job: ServeJob, config: ModelConfig) -> int:
    """Most tokens of one request.

    Raises:
        ServeError: the job wants more than the model has.
    """
    scaling = config.rope_scaling
    dynamic = scaling is not None and scaling.rope_type == "dynamic"
    wanted = job.max_position or int(min(config.max_position, slot_length(job)))
    require(
        wanted <= config.max_position,
        "max_position",
        wanted,
        expected=f"at most {config.max_position}, the positions of model {config.name}",
        hint="beyond them dynamic rope scaling turns every key by the length of its context, and "
        "keys in the cache are shared by contexts of many lengths"
        if dynamic
        else "serve shorter requests, or a model with more positions",
        error=ServeError,
    )
    return wanted


def concrete(
    job: ServeJob,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device = _CPU,
) -> ServeJob:
    """The job with cache, positions, precision and threads as they will be.

    Args:
        job: what to do.
        config: of the model.
        dtype: of its weights.
        device: where its cache will be.

    Raises:
        ServeError: the memory does not hold the cache.
    """
    longest = positions(job, config)
    form = table("kv_format").build(job.kv_format, where="kv_format")
    size = token_bytes(heads_of(config), dtype, form)
    room = _free_bytes(device) // job.replicas  # the others on this host take as much
    if job.kv_tokens is None:
        tokens = min(job.max_running * longest, int(room * _CACHE_SHARE) // size)
    else:
        tokens = job.kv_tokens
    require(
        0 < tokens * size <= room,
        "kv_tokens",
        tokens,
        expected=f"at most {room // size}: a token takes {size} bytes, and {human_bytes(room)} "
        "are free",
        hint="give a smaller kv_tokens or a smaller model",
        error=ServeError,
    )
    host_tokens = job.host_tokens_of(tokens)
    require(
        (tokens + host_tokens) * size <= room,
        "host_tokens",
        host_tokens,
        expected=f"at most {room // size - tokens} beside a cache of {tokens}: a token takes "
        f"{size} bytes, and {human_bytes(room)} are free",
        hint="give a smaller host_tokens",
        error=ServeError,
    )
    return job.model_copy(
        update={
            "kv_tokens": tokens,
            "host_tokens": host_tokens,
            "max_position": longest,
            "precision": "bf16" if dtype == torch.bfloat16 else "fp32",
            "threads": job.threads_of(num_cores()),
        }
    )


# What makes the hooks of an engine in one process, or none where its job has no need of them.
_HOOKS = (
    "shoal.serve.cache.host:copies_of",
    "shoal.serve.decode.portions:streams_of",
    "shoal.serve.decode.portions:shares_of",
    "shoal.serve.adapters.hook:adapters_of",
    "shoal.serve.engine.pooling:pooling_of",
    "shoal.serve.engine.prompt_logprobs:prompt_logprobs_of",
    "shoal.serve.engine.captured:captured_of",
    "shoal.serve.text.grammar:grammars_of",
)


@dataclass(slots=True)
class EngineBuilder:
    """An engine that is being built, as seen by the code that makes its hooks.

    Args:
        kv: books of the cache.
        limits: of the scheduler.
        cache: tensors of the cache.
        plain: whether the runner is a :class:`~shoal.serve.engine.runner.LocalRunner` itself.
        local: whether all blocks of a request lie in this cache.
        link: of a slower host tier, to emulate; what makes the host tier measures it otherwise.
        attention: kernel of ``paged_attention`` for single tokens.
    """

    job: ServeJob
    model: Transformer
    kv: KVManager
    limits: SchedulerLimits
    cache: PagedCache
    plain: bool
    local: bool
    link: HostLink | None = None
    attention: Ready | None = None


def engine_of(
    job: ServeJob,
    model: Transformer,
    *,
    link: HostLink | None = None,
    cost: StepCost | None = None,
    phase: PhasePart | None = None,
    zeros: Zeros | None = None,
    runner_type: type[LocalRunner] = LocalRunner,
) -> tuple[Engine, SchedulerLimits, LocalRunner]:
    """An engine for a model that is loaded, with its limits and its runner.

    Args:
        job: what to do.
        model: with its weights.
        link: of a slower host tier, to emulate; None uses the machine's memory as it is.
        cost: seconds of a step, for ``preempt = auto``; measured where it is needed.
        phase: the scheduler of one phase, in the place of the job's.
        zeros: makes the tensors of the cache; they are in memory of this process without.
        runner_type: of the runner.

    Raises:
        ShoalError: a part or a limit of the job cannot be.
    """
    config = model.config
    decode: DecodePart = table("decode").build(job.decode, where="decode")
    decode.check(config)
    require(
        "token_by_token" in traits("decode", job.decode),
        "decode",
        job.decode.name,
        expected="autoregressive for what profiles, replays or hands over steps of an engine",
        hint="shoal serve decodes by diffusion",
        error=ServeError,
    )
    require(
        model.decodes,
        "model",
        config.name,
        expected=f"one with another gate than {config.architecture.moe.gate.name}: its experts "
        "choose among whole sequences, and a decoded token comes alone",
        error=ServeError,
    )
    require(
        job.parallel.world == job.parallel.depth == 1,
        "parallel",
        f"tp={job.parallel.tp}, pp={job.parallel.pp}, in_flight={job.parallel.depth}",
        expected="1 of each in an engine of one process",
        hint="shoal serve starts ranks; what profiles, replays or hands over uses one process",
        error=ServeError,
    )
    job = concrete(job, config, model.weight.dtype, model.weight.device)
    kv, limits, cache = cache_of(job, model, zeros)
    plain = job.speculative is None and runner_type is LocalRunner
    built = EngineBuilder(job, model, kv, limits, cache, plain, runner_type is LocalRunner, link)
    built.attention = attention_kernel(job, model, cache)
    hooks = [hook for name in _HOOKS if (hook := load_object(name)(built)) is not None]
    options: dict[str, Any] = {
        "attention": built.attention,
        "prompts": attention_kernel(job, model, cache, prompts=True),
        "exact": job.exact,
        "hooks": hooks,
    }
    if job.speculative is not None:
        runner: LocalRunner = speculative_runner(built, options)
    else:
        runner = runner_type(model, cache, **options)
    if job.host_tokens and cost is None and "chooses_by_price" in traits("preempt", job.preempt):
        cost = quick_cost(runner, limits)
    preempt_part: PreemptPart = table("preempt").build(job.preempt, where="preempt")
    preemption = preempt_part.build(
        kv, limits, host_tokens=job.host_tokens or 0, link=built.link, cost=cost
    )
    if phase is not None:
        # An instance of one phase preempts no request: what it holds is leaving, or was let in.
        scheduler = phase.build(kv, limits)
    else:
        scheduler_part: SchedulerPart = table("scheduler").build(job.scheduler, where="scheduler")
        scheduler = scheduler_part.build(kv, limits, preemption)
    engine = Engine(scheduler, runner, kv=kv, vocab_size=config.vocab_size, hooks=hooks)
    if isinstance(runner, SpeculativeRunner):
        speculate(engine, runner, limits, job)
    return engine, limits, runner


def cache_of(
    job: ServeJob, model: Transformer, zeros: Zeros | None = None
) -> tuple[KVManager, SchedulerLimits, PagedCache]:
    """Bookkeeping, limits and tensors of the cache of a concrete job."""
    assert job.kv_tokens is not None and job.max_position is not None
    kv_part: KVPart = table("kv").build(job.kv, where="kv")
    kv = kv_part.build(job.kv_tokens)
    cache = PagedCache(
        heads_of(model.config),
        kv.num_blocks,
        kv.block_size,
        dtype=model.weight.dtype,
        device=model.weight.device,
        form=table("kv_format").build(job.kv_format, where="kv_format"),
        zeros=zeros,
        slot_blocks=kv.max_len // kv.block_size if isinstance(kv, CompactingKVManager) else 0,
    )
    return kv, job.limits, cache


def build_engine(job: ServeJob) -> tuple[Engine, ModelConfig]:
    """The engine of a job, its model loaded, and the model's configuration.

    Raises:
        ShoalError: the model cannot be read, or a part or a limit of the job cannot be.
    """
    model = load_model(job, computes_on(job))
    if "whole_blocks" in traits("decode", job.decode):
        from shoal.serve.decode.diffusion.build import diffusion_engine

        engine, cache = diffusion_engine(job, model)
    else:
        engine, _, runner = engine_of(job, model)
        cache = runner.cache
        if job.speculative is None:
            warm(runner)
    cache.populate(_POPULATED)
    # What is there now stays: it need not be searched for garbage between two steps.
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
    return engine, model.config
