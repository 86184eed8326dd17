"""Trainings and decodings of ParScale's claim.

A model is trained in two stages. The first has one stream, most of the tokens, and the learning
rate at its peak. The second goes on from there with any number of streams, on the same text in the
same order, while the learning rate falls to nothing. Prefixes begin as texts of the training data
and learn faster than the weights, as does the aggregator.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal.claims.experiments.tiny import requests, served
from shoal.core.random import generator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shoal.claims.experiments.arch_training import ModuleText
    from shoal.claims.frame import ClaimRun
    from shoal.claims.protocols import ExperimentContext
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer

__all__ = [
    "Stages",
    "TrainingResult",
    "cache_bytes",
    "configuration",
    "count",
    "decoded",
    "wrong_tokens",
]

_CONTEXT = 128
_TOKENS = 32


class TrainingResult(NamedTuple):
    """What came of a training.

    Args:
        loss: on held-out text, nats a byte.
        step_s: seconds of a step of the second stage.
    """

    loss: float
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Stages:
    """How the models are trained.

    Args:
        steps: of both stages.
        late: share of them in the second.
        prefix: virtual tokens of a stream.
        faster: how many times as fast prefixes and aggregator learn.
        data: text.
    """

    steps: int
    late: float
    prefix: int
    faster: float
    data: ModuleText

    def trained(
        self, context: ExperimentContext, hidden: int, streams: int, seed: int
    ) -> TrainingResult:
        """A model of so many streams in the second stage; models of one seed share the first."""
        from shoal.claims.experiments.arch_training import Recipe, heldout, train
        from shoal.train.zoo import random

        data, last = self.data, max(1, round(self.late * self.steps))
        first = max(1, self.steps - last)

        def begun() -> Transformer:
            model = random(configuration(hidden, 1, self.prefix), seed)
            return train(model, data.train, Recipe(steps=first), seed, rate=lambda done: 1.0)

        def run() -> TrainingResult:
            base = context.remember(f"first {hidden} {seed}", begun)
            model, recipe = self._grown(base, streams, seed), Recipe(steps=last)
            start = time.perf_counter()
            train(
                model,
                data.train,
                recipe,
                seed,
                first=first,
                rate=lambda done: 1 - done,
                faster={".prefix": self.faster, "aggregate.": self.faster},
            )
            seconds = time.perf_counter() - start
            return TrainingResult(heldout(model, data.heldout, recipe), seconds / last)

        return context.remember(f"trained {hidden} {streams} {seed}", run)

    def _grown(self, base: Transformer, streams: int, seed: int) -> Transformer:
        """A copy of a model, with streams; each begins behind a text of its own."""
        import torch

        from shoal.model.architecture import rebuilt

        base = copy.deepcopy(base)
        if streams == 1:
            return base
        source = generator(seed, purpose="texts of streams")
        starts = source.integers(0, len(self.data.train) - self.prefix, streams)
        rows = [self.data.train[at : at + self.prefix] for at in starts]
        architecture = configuration(base.config.hidden, streams, self.prefix).architecture
        texts_PM = torch.from_numpy(np.stack(rows).astype(np.int64))
        return rebuilt(base, architecture, seed, texts_PM=texts_PM)


def configuration(hidden: int, streams: int, prefix: int) -> ModelConfig:
    """Of a model of the claim."""
    from shoal.claims.experiments.arch_training import mini

    wanted: dict[str, Any] = {"num": streams, "prefix": prefix}
    # One head of keys and values, as the paper's models have few.
    return mini(hidden, 4, ffn=16 * hidden // 5, num_kv_heads=1, architecture={"streams": wanted})


def count(config: ModelConfig) -> int:
    """Parameters."""
    from shoal.cost.arithmetic import parameters

    return parameters(config.shape())


def cache_bytes(config: ModelConfig) -> int:
    """Bytes of the keys and values of one stream's context, in fp32."""
    return 4 * _CONTEXT * 2 * config.num_layers * config.num_kv_heads * config.head_dim


def decoded(
    run: ClaimRun, arms: Mapping[str, tuple[int, int]], prefix: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a token of one sequence with the kernels of serving, on one thread, in turn.

    Args:
        run: whose arms they are.
        arms: name -> width and streams.
        prefix: virtual tokens of a stream.
        rounds: how often each decodes.
    """
    decoders = {name: _decoder(configuration(*arm, prefix)) for name, arm in arms.items()}
    timed = run.race(decoders, rounds, swaps={}, threads=1)
    return {name: [one / _TOKENS for one in each] for name, each in timed.items()}


def _decoder(config: ModelConfig) -> Callable[[], object]:
    from shoal.ir import ServeJob
    from shoal.model.generate import generate
    from shoal.serve.engine.build import prepare
    from shoal.train.zoo import random

    model = prepare(ServeJob(model="mini", precision="fp32", threads=1), random(config))
    return lambda: generate(model, [1, 2, 3, 4], _TOKENS)


def wrong_tokens(config: ModelConfig, seed: int) -> int:
    """Tokens of the engine that are not those of plain generation, in eight requests."""
    from shoal.ir import ServeJob
    from shoal.model.generate import generate
    from shoal.serve.engine.build import engine_of, prepare
    from shoal.train.zoo import random

    config = config.model_copy(update={"initializer_range": 0.1})
    prompts = [
        generator(seed, purpose="prompt", index=number).integers(0, 256, 7 + 5 * number).tolist()
        for number in range(8)
    ]
    plain = random(config, seed).eval()
    want = [generate(plain, prompt, 12) for prompt in prompts]
    job = ServeJob(model="mini", precision="fp32", kv_tokens=2048, threads=1, max_step_tokens=32)
    engine, _, _ = engine_of(job, prepare(job, random(config, seed)))
    return sum(
        one != other
        for found, tokens in zip(served(engine, requests(prompts, 12)), want, strict=True)
        for one, other in zip(found, tokens, strict=True)
    )
