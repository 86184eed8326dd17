"""A draft model's directory: whether it goes with the served model, and how it is made ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from shoal.core.errors import ModelError, require
from shoal.ir import MAX_NODES, ServeJob
from shoal.kernel.protocols import Ready
from shoal.model import huggingface
from shoal.model.config import ModelConfig
from shoal.model.drafters.files import tokenizer_hash
from shoal.model.transformer import Transformer
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.captured import Recordings
from shoal.serve.decode.draft.net import DraftModelNet, DraftNet

_BLOCK = 16


def check_draft(directory: Path, job: ServeJob, target: ModelConfig) -> ModelConfig:
    """The configuration of a draft for this target.

    Raises:
        ModelError: no model lies there, or its tokens are not the target's; names both hashes.
    """
    config = huggingface.read_config(directory)
    require(
        config.vocab_size == target.vocab_size,
        f"{directory}: vocab_size",
        config.vocab_size,
        expected=f"{target.vocab_size}, as model {target.name} has",
        hint="a draft must know the same tokens; give one of the target's family",
        error=ModelError,
    )
    mine, theirs = tokenizer_hash(directory), tokenizer_hash(Path(job.model))
    if mine != theirs:
        raise ModelError(
            f"{directory}: its tokenizer is {mine or 'none'}, and that of {job.model} is "
            f"{theirs or 'none'}: the same numbers mean other words; give a draft with the same "
            "tokenizer"
        )
    return config


def limit_of(config: ModelConfig, job: ServeJob) -> int:
    """Most tokens of a request that a draft can read."""
    return min(config.max_position, job.max_position or config.max_position)


def load_draft(path: str, job: ServeJob, target: Transformer) -> tuple[DraftNet, int]:
    """A draft ready to guess for this target, and the most tokens of a request that it can read.

    Raises:
        ModelError: it is none for this target.
    """
    config = check_draft(Path(path), job, target.config)
    limit = limit_of(config, job)
    return draft_net(path, job, limit, target.weight.dtype, target.weight.device), limit


def draft_net(
    path: str,
    job: ServeJob,
    limit: int,
    dtype: torch.dtype,
    device: torch.device,
    cut: Callable[[Transformer], None] | None = None,
) -> DraftNet:
    """A draft ready to guess.

    Args:
        path: its directory.
        job: of the target.
        limit: most tokens of a request.
        dtype: of its weights.
        device: where they lie.
        cut: leaves of it what this process computes; all if not given.
    """
    draft = huggingface.read(Path(path), dtype).to(device).requires_grad_(False).eval()
    if cut is not None:
        cut(draft)
    nbytes = sum(one.numel() * one.element_size() for one in draft.parameters())
    own = _draft_job(path, job, limit)
    if dtype in (torch.float32, torch.bfloat16):
        from shoal.serve.engine.build import prepare

        draft = prepare(own, draft)
    return _net_of(draft, own, job, limit, nbytes)


def _draft_job(path: str, job: ServeJob, limit: int) -> ServeJob:
    """The job of serving the draft itself, as far as kernels are concerned."""
    return ServeJob(
        model=path,
        precision=job.precision,
        threads=job.threads,
        exact=job.exact,
        max_running=job.max_running,
        max_position=limit,
        kv_tokens=max(limit, job.kv_tokens or limit),
        speculative=job.speculative,
    )


def _net_of(draft: Transformer, own: ServeJob, job: ServeJob, limit: int, nbytes: int) -> DraftNet:
    """Passes of a draft over a cache of its own, as large as the target's and room for trees."""
    from shoal.serve.engine.build import attention_kernel

    cache, kernel = cache_of(draft, job, own, limit)
    return DraftNet(
        draft,
        cache,
        nbytes=nbytes,
        attention=kernel,
        prompts=attention_kernel(own, draft, cache, prompts=True),
        recorded=recordings(draft, cache, kernel, limit),
    )


def cache_of(
    draft: Transformer, job: ServeJob, own: ServeJob, limit: int
) -> tuple[PagedCache, Ready | None]:
    """A cache for all requests of a job and the trees under them, and who reads trees in it.

    Args:
        draft: whose keys and values it is for.
        job: of the target.
        own: of the draft, as far as kernels are concerned.
        limit: most tokens of a request.
    """
    from shoal.serve.engine.build import attention_kernel

    rooms = job.max_running * (MAX_NODES + _BLOCK)
    tokens = (job.kv_tokens or limit) + rooms
    cache = PagedCache(
        draft.config,
        -(-tokens // _BLOCK),
        _BLOCK,
        dtype=draft.weight.dtype,
        device=draft.weight.device,
    )
    return cache, attention_kernel(own, draft, cache)


def recordings(
    model: DraftModelNet, cache: PagedCache, kernel: Ready | None, limit: int
) -> Recordings | None:
    """Recorded passes, where this machine has kernels that can be recorded."""
    if kernel is None or cache.device.type != "cpu":
        return None
    return Recordings(model, cache, kernel, limit + MAX_NODES + 1)
