"""From a serving job to an engine that decodes by diffusion."""

from __future__ import annotations

from shoal.core.parts import table
from shoal.ir import ServeJob
from shoal.model.transformer import Transformer
from shoal.plan.batching.schedulers.masked import MaskedScheduler
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.diffusion.part import Diffusion
from shoal.serve.decode.diffusion.runner import DiffusionRunner
from shoal.serve.engine.build import cache_of, concrete
from shoal.serve.engine.loop import Engine


def diffusion_engine(job: ServeJob, model: Transformer) -> tuple[Engine, PagedCache]:
    """An engine for a model that is loaded, and its cache.

    Raises:
        ShoalError: a part or a limit of the job cannot be, or the model is of another kind.
    """
    decode: Diffusion = table("decode").build(job.decode, where="decode")
    config = model.config
    decode.check(config)
    assert config.mask_token_id is not None
    kv, limits, cache = cache_of(concrete(job, config, model.weight.dtype), model)
    runner = DiffusionRunner(
        model,
        cache,
        unmask=table("unmask").build(decode.unmask),
        refresh=table("refresh").build(decode.refresh),
        iteration=table("iteration").build(decode.iteration),
        block=decode.block,
        longest=limits.max_position,
        rows=limits.max_running,
        unroll=decode.unroll,
    )
    scheduler = MaskedScheduler(kv, limits, block=decode.block, mask_id=config.mask_token_id)
    return Engine(scheduler, runner, kv=kv, vocab_size=config.vocab_size, hooks=[runner]), cache
