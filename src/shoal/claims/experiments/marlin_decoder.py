"""The decoders of claim ``marlin``: one to be timed, one whose quality is measured."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import torch

from shoal.claims.experiments.tiny import llama
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import table
from shoal.corpora.tokens import prepare
from shoal.kernel.formats import weight_format
from shoal.model.attention import KVCache
from shoal.model.huggingface import read
from shoal.model.lowbit import LowBitLinear
from shoal.model.quantize.blocks import quantize
from shoal.model.transformer import Transformer
from shoal.train import zoo
from shoal.train.quality import compare
from shoal.train.quantize import calibration

_CONTEXT, _TOKENS = 32, 4


def decoders(
    width: int, fmt: str, cold_bytes: float, seed: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Four blocks of bf16, and the same with low-bit matrices: each call decodes some tokens.

    Every call takes the next of so many copies that no weight is found in a cache.
    """
    ffn = (8 * width // 3 + 127) // 128 * 128
    config = llama(width, 4, width // 128, vocab=4096, ffn=ffn, tied=True)
    plain = zoo.random(config, seed).bfloat16().requires_grad_(False)
    low = copy.deepcopy(plain)
    for module in list(low.blocks.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, LowBitLinear.from_linear(child, fmt))
    return _decoding(plain, cold_bytes), _decoding(low, cold_bytes)


def _decoding(model: Transformer, cold_bytes: float) -> Callable[[], None]:
    size = sum(t.nbytes for t in itertools.chain(model.parameters(), model.buffers()))
    models = [copy.deepcopy(model) for _ in range(max(2, math.ceil(cold_bytes / size)))]
    opening = torch.arange(_CONTEXT)[None]
    token = torch.zeros(1, 1, dtype=torch.int64)
    caches = []
    with torch.inference_mode():
        for each in models:
            cache = KVCache(model.config, 1, _CONTEXT + 1, dtype=torch.bfloat16)
            each(opening, cache=cache)
            caches.append(cache)
    turns = itertools.cycle(zip(models, caches, strict=True))

    def run() -> None:
        with torch.inference_mode():
            for each, cache in itertools.islice(turns, _TOKENS):
                cache.length = _CONTEXT
                each(token, cache=cache)

    return run


def losses(name: str, fmt: str, context: ExperimentContext) -> tuple[float, float, float]:
    """Nats a token on held-out text: of a mini-model, of its nearest codes, of GPTQ's."""
    directory = zoo.trained(name)
    plain = read(directory).float()
    vocab_size = plain.config.vocab_size
    tokens = prepare("stdlib", str(directory), vocab_size)
    text = calibration(tokens.train, samples=64, length=512, vocab_size=vocab_size)
    results = []
    for method in ("rtn", "gptq"):
        context.progress(f"quality of {method}", 0.95)
        quantizer = table("quantizer").build(method)
        made = quantize(copy.deepcopy(plain), weight_format(fmt), quantizer, text).model
        quality = compare(made, plain, tokens.heldout, max_tokens=60_000)
        results.append((math.log(quality.reference), math.log(quality.perplexity)))
    return results[0][0], results[0][1], results[1][1]
