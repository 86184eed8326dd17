"""What claim [17] EnergonAI runs: packed and padded prompts, two pipelines, three memories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.claims.experiments.tiny import llama, requests, served
from shoal.core.random import generator
from shoal.ir import ServeJob

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer
    from shoal.serve.ranks.workers import RankedEngine

__all__ = ["FirstTokens", "generate", "lengths", "model_of", "one_process", "pipeline", "steps_of"]

_VOCAB = 4096


def config(layers: int, hidden: int, longest: int) -> ModelConfig:
    """A dense model; its logits are well apart."""
    return llama(
        hidden, layers, hidden // 64, kv_heads=max(1, hidden // 128), vocab=_VOCAB, length=longest,
        initializer_range=0.1, tied=True,
    )  # fmt: skip


def model_of(layers: int, hidden: int, seed: int, *, longest: int = 1024) -> Transformer:
    """Random weights, as they were before they are prepared for serving."""
    from shoal.model.initialise import init_weights
    from shoal.model.transformer import Transformer

    model = Transformer(config(layers, hidden, longest))
    init_weights(model, seed=seed)
    return model


def job(**changes: Any) -> ServeJob:
    """What all runs here have in common: one thread of each process."""
    fields = {"model": "random", "precision": "fp32", "threads": 1, "kv_tokens": 8192}
    return ServeJob.model_validate({**fields, **changes})


def lengths(count: int, longest: int, seed: int) -> list[int]:
    """Lognormal lengths up to ``longest``, of the first draw whose mean is 0.38 to 0.42 of that."""
    for turn in range(10_000):
        source = generator(seed, purpose="lengths", step=turn)
        drawn = source.lognormal(0.0, 0.6, count)
        values = np.maximum(1, np.rint(drawn / drawn.max() * longest)).astype(int)
        if 0.38 <= values.mean() / longest <= 0.42:
            return [int(n) for n in values]
    raise ValueError(f"no {count} lengths have a mean of 0.4 of the longest")


class FirstTokens:
    """The first tokens after some prompts, computed side by side or padded to the longest.

    Args:
        model: ready to serve.
        prompts: token ids.
    """

    def __init__(self, model: Transformer, prompts: Sequence[Sequence[int]]) -> None:
        from shoal.model.linear import DispatchedLinear
        from shoal.serve.cache.paged import PagedCache

        self._model, self._prompts = model, prompts
        self._longest = max(len(prompt) for prompt in prompts)
        self._cache = PagedCache(model.config, len(prompts), self._longest)
        self._rows: list[int] = []
        # The last block goes on with the rows that are wanted, padded or not.
        for block in model.blocks[:-1]:
            for module in block.modules():
                if isinstance(module, DispatchedLinear):
                    module.register_forward_hook(self._count)

    def _count(self, module: Any, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        self._rows.append(inputs[0].numel() // module.in_features)

    def rows(self, *, padded: bool) -> tuple[list[int], int]:
        """Next tokens, and the rows of every product of a linear layer, which are all the same."""
        self._rows.clear()
        tokens = self.run(padded=padded)
        (rows,) = set(self._rows)
        return tokens, rows

    def run(self, *, padded: bool) -> list[int]:
        """Next token of every prompt."""
        import torch

        from shoal.serve.cache.attention import PagedAttention, RequestContext

        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        contexts = []
        for number, prompt in enumerate(self._prompts):
            length = self._longest if padded else len(prompt)
            last.append(len(tokens) + len(prompt) - 1)
            tokens += [*prompt, *[0] * (length - len(prompt))]
            positions += range(length)
            slots += range(number * self._longest, number * self._longest + length)
            contexts.append(RequestContext(0, length, (number,)))
        with torch.inference_mode():
            mixer = PagedAttention(self._cache, contexts, torch.tensor(slots), torch.float32)
            hidden = self._model.flat(
                torch.tensor(tokens), torch.tensor(positions), mixer, torch.tensor(last)
            )
            best: list[int] = self._model.logits(hidden).argmax(-1).tolist()
        return best


def generate(engine: Any, count: int, tokens: int, seed: int) -> list[list[int]]:
    """What an engine answers to ``count`` prompts of 16 tokens at once."""
    prompts = (
        generator(seed, purpose="prompt", index=number).integers(0, _VOCAB, 16).tolist()
        for number in range(count)
    )
    return served(engine, requests(prompts, tokens))


def pipeline(directory: Path, *, blocking: bool, latency_s: float) -> RankedEngine:
    """Two stages, each a process, with four steps under way over an emulated link."""
    from shoal.model import huggingface
    from shoal.serve.ranks.workers import ranked_engine

    # Every prompt is computed anew: nothing is found in the cache of the turn before.
    kv = {"name": "paged", "prefix_reuse": False}
    return ranked_engine(
        job(model=str(directory), parallel={"pp": 2, "in_flight": 4}, kv=kv),
        huggingface.read_config(directory),
        blocking=blocking,
        latency_s=latency_s,
    )


def one_process(directory: Path) -> Any:
    """The same model in this process."""
    from shoal.serve.engine.build import build_engine

    return build_engine(job(model=str(directory)))[0]


def steps_of(model: Transformer, tokens: int) -> Callable[[], object]:
    """A step of one prompt of so many tokens."""
    packed = FirstTokens(model, [list(range(tokens))])
    return lambda: packed.run(padded=False)
