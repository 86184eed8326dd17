"""[17] EnergonAI: packed batches, a pipeline that never blocks, weights in a neighbour's memory.

Prompts of lognormal lengths, all tokens side by side, beside every prompt padded to the longest.
Two processes, four steps under way, over a link of 3 ms, beside a sender that waits for its
receiver. Six of twenty layers in another memory, 1.5 times as long to copy as to compute: with and
without prefetching, beside resident layers. The A/A run pads, blocks and copies late.

Source: Du et al., EnergonAI: An Inference System for 10-100 Billion Parameter Transformer Models,
2022.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import llama, requests, served
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.ir import ServeJob

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer
    from shoal.serve.ranks.workers import RankedEngine

_LATENCY_S = 3e-3
_COPY = 1.5
_HIDDEN = 384


@part
class EnergonAI(BaseClaim, row=17):
    """Packed or padded, blocking or not, resident or elsewhere.

    Args:
        prompts: prompts of the packed batch.
        longest: tokens of the longest of them.
        requests: requests of the pipeline, at once.
        tokens: tokens that each of them generates.
        layers: layers of the model of which some lie elsewhere.
        rounds: timed pairs.
    """

    prompts: Annotated[int, Ge(2)] = 16
    longest: Annotated[int, Ge(2)] = 200
    requests: Annotated[int, Ge(2)] = 16
    tokens: Annotated[int, Ge(2)] = 32
    layers: Annotated[int, Ge(2)] = 20
    rounds: Annotated[int, Ge(2)] = 16

    def collect(self, run: ClaimRun) -> None:
        """Count rows; then, unless it is quick, time the three."""
        wrong = self._packed(run)
        if not run.quick:
            run.progress("pipeline", 0.3)
            wrong += self._pipeline(run)
            run.progress("memory", 0.7)
            self._memory(run)
        run.put("wrong_tokens", wrong)

    def _packed(self, run: ClaimRun) -> int:
        from shoal.core.random import generator
        from shoal.serve.engine.build import prepare

        hidden, longest = (64, 32) if run.quick else (_HIDDEN, self.longest)
        counts = lengths(self.prompts, longest, run.seed)
        prompts = [
            generator(run.seed, purpose="packed", index=number).integers(0, 4096, n).tolist()
            for number, n in enumerate(counts)
        ]
        both = FirstTokens(prepare(job(), model_of(4, hidden, run.seed)), prompts)
        tokens, rows = both.rows(padded=run.as_baseline)
        reference, _ = both.rows(padded=True)
        run.put("linear_rows", rows, sum(counts))
        if not run.quick:
            arms = {
                "packed": functools.partial(both.run, padded=False),
                "padded": functools.partial(both.run, padded=True),
            }
            timed = run.race(arms, self.rounds, swaps={"packed": "padded"})
            run.put("packed_prefill", timed["packed"], timed["padded"])
        return sum(one != other for one, other in zip(tokens, reference, strict=True))

    def _pipeline(self, run: ClaimRun) -> int:
        from shoal.model import huggingface

        directory = run.work_dir / "pipeline"
        if not directory.exists():
            huggingface.write(directory, model_of(8, _HIDDEN, run.seed))
        size = (self.requests, self.tokens, run.seed)
        want = run.remember("answers", lambda: generate(one_process(directory), *size))
        wrong = 0
        blocks = run.arms({"nonblocking": False, "blocking": True}, {"nonblocking": "blocking"})
        with contextlib.ExitStack() as stack:
            engines = {}
            for name, blocking in blocks.items():
                engines[name] = pipeline(directory, blocking=blocking, latency_s=_LATENCY_S)
                stack.callback(engines[name].close)

            def answer(name: str) -> None:
                nonlocal wrong
                wrong += generate(engines[name], *size) != want

            arms = {name: functools.partial(answer, name) for name in engines}
            timed = run.race(arms, self.rounds, swaps={})
        run.put("nonblocking_pipeline", timed["nonblocking"], timed["blocking"])
        return wrong

    def _memory(self, run: ClaimRun) -> None:
        from shoal.serve.cache.weights import PeerMemory
        from shoal.serve.engine.build import prepare

        def model() -> Transformer:
            return prepare(job(), model_of(self.layers, _HIDDEN, run.seed))

        resident = steps_of(model(), 96)
        alone = run.race({"resident": resident}, 8)["resident"]
        layer_s = sorted(alone)[len(alone) // 2] / self.layers
        layer_bytes = 4 * sum(
            one.numel() for name, one in model().blocks[0].named_parameters() if "norm" not in name
        )
        speed = layer_bytes / (_COPY * layer_s)

        def elsewhere(*, prefetch: bool) -> Callable[[], object]:
            made = model()
            PeerMemory(fraction=0.3, prefetch=prefetch, bytes_per_s=speed).apply(made)
            return steps_of(made, 96)

        ours, late = (elsewhere(prefetch=on) for on in (not run.as_baseline, False))
        arms = {"resident": resident, "elsewhere": ours, "late": late}
        timed = run.race(arms, 2 * self.rounds, swaps={"late": "resident"})
        run.put("peer_memory", timed["elsewhere"], timed["resident"])
        run.put("peer_memory_without_prefetch", timed["late"], timed["resident"])


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
    """The first tokens after some prompts, computed side by side or padded to the longest."""

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
