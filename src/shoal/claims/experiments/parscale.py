"""[108] ParScale: parallel streams of the same weights instead of more weights.

The law fitted to published losses, beside the paper's. Mini-models of bytes with one, two and four
streams, three seeds, by the paper's recipe, and a wider dense model, from which follows the size
with the loss of four streams (the widest stands for it where none is as good: saved at least).
Bytes and time of decoding with each; the same at 1.6e9 parameters by the law and an H200's
roofline; greedy tokens beside plain generation. The A/A run has one stream everywhere.

Source: Chen et al., Parallel Scaling Law for Language Models, 2025.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Ge, Gt, Lt

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import requests, serve_job, served
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.random import generator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shoal.claims.experiments.arch_training import ModuleText
    from shoal.cost.scaling.parscale import EqualLoss, ParallelLaw
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer

_STREAMS = (1, 2, 4)
_PAPER_K = {"stack": 0.39, "pile": 0.33}


@part
class ParScaleClaim(BaseClaim, row=108):
    """The law, the losses of one, two and four streams, and what both ways of growing cost.

    Args:
        seeds: trainings of each model.
        steps: steps of one training.
        late: share of the steps that have streams.
        hidden: width of the model with streams.
        wider: widths of the dense models that it is compared with.
        prefix: virtual tokens of a stream.
        faster: how many times as fast prefixes and aggregator learn as the weights.
        rounds: timed rounds of decoding.
    """

    seeds: Annotated[int, Ge(1)] = 3
    steps: Annotated[int, Ge(1)] = 250
    late: Annotated[float, Gt(0), Lt(1)] = 0.2
    hidden: Annotated[int, Ge(1)] = 160
    wider: tuple[int, ...] = (224,)
    prefix: Annotated[int, Ge(1)] = 48
    faster: Annotated[float, Gt(0)] = 5.0
    rounds: Annotated[int, Ge(1)] = 20

    def __post_init__(self) -> None:
        wider = min(self.wider, default=0) > self.hidden
        expected = f"widths above hidden = {self.hidden}"
        require(wider, "claim.parscale.wider", self.wider, expected=expected)

    def collect(self, run: ClaimRun) -> None:
        """Fit the law and compare tokens; then, unless it is quick, train and decode."""
        self._law(run)
        config = configuration(self.hidden, run.pick(4, 1), self.prefix)
        run.put("wrong_tokens", wrong_tokens(config, run.seed))
        if not run.quick:
            self._train(run)

    def _law(self, run: ClaimRun) -> None:
        from shoal.cost.scaling.parscale import PUBLISHED, equal_loss
        from shoal.cost.shapes import find
        from shoal.machine.described import load

        laws = _laws(run.context)
        fits, away = [], []
        rows: list[EqualLoss] = []
        for corpus, points in PUBLISHED.items():
            law = laws[corpus]
            if run.as_baseline:  # streams that are worth nothing
                law = law.model_copy(update={"k": 0.0})
            true = np.array([point.loss for point in points])
            said = np.array([law.loss(point.params, point.streams) for point in points])
            fits.append(1 - float(((true - said) ** 2).sum() / ((true - true.mean()) ** 2).sum()))
            away.append(abs(law.k - _PAPER_K[corpus]))
            # Four streams of 1.6e9 parameters beside the dense model, one request of 256 tokens.
            beside: dict[str, Any] = {"params": 1.6e9, "streams": (4,), "context": 256}
            rows += equal_loss(law, find("Qwen2.5-1.5B"), load("1xH200"), **beside)
        run.put("memory_saved_1b6", (row.memory_saved or 0.0 for row in rows))
        run.put("latency_saved_1b6", (row.latency_saved or 0.0 for row in rows))
        run.put("law_r2", fits)
        run.put("law_k", away)

    def _train(self, run: ClaimRun) -> None:
        """Losses, and what both ways of growing cost."""
        from shoal.claims.experiments.arch_training import text

        how: dict[str, Any] = {
            name: getattr(self, name) for name in ("steps", "late", "prefix", "faster")
        }
        stages = Stages(data=text(run.context.data), **how)

        def trained(hidden: int, streams: int) -> list[TrainingResult]:
            results = []
            for number in range(self.seeds):
                seed = run.seed + number
                said = f"width {hidden}, {streams} streams, seed {seed}"
                run.progress(said, 0.1 + 0.8 * number / self.seeds)
                results.append(stages.trained(run.context, hidden, streams, seed))
            return results

        arms = {num: trained(self.hidden, run.pick(num, 1)) for num in _STREAMS}
        result = {num: [one.loss for one in arms[num]] for num in _STREAMS}
        wide = {width: trained(width, 1) for width in self.wider}
        dense = {width: [one.loss for one in wide[width]] for width in self.wider}
        plain = {
            width: configuration(width, 1, self.prefix) for width in (self.hidden, *self.wider)
        }
        sizes = {width: count(config) for width, config in plain.items()}
        own = sizes[self.hidden]
        losses = [fmean(result[1]), *(fmean(dense[width]) for width in self.wider)]
        equal = _equal_size([*sizes.values()], losses, fmean(result[4]))
        grown = configuration(self.hidden, 4, self.prefix)
        more = 4 * (count(grown) - own) + 3 * cache_bytes(grown)
        # What the paper's streams are worth at this size, by its law of code.
        law = _laws(run.context)["stack"]
        line = {num: law.loss(own, num) for num in _STREAMS}
        run.put("loss_2", result[2], result[1], bound=line[2] / line[1])
        run.put("loss_4", result[4], result[1], bound=line[4] / line[1])
        run.put("loss_4_of_2", result[4], result[2], bound=line[4] / line[2])
        run.put("memory_saved", self._growth(own, equal), more)
        token_s = self._decode(run, equal / own)
        read = 4 * own + cache_bytes(plain[self.hidden])  # bytes of a decoded token
        run.bounds["latency"] = (read + more) / (read + self._growth(own, equal))
        step_s = {
            **{f"{num} streams": fmean(one.step_s for one in arms[num]) for num in _STREAMS},
            **{f"width {width}": fmean(one.step_s for one in wide[width]) for width in wide},
        }
        steps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in step_s.items())
        tokens = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in token_s.items())
        run.profile = f"s a training step: {steps}; ms a decoded token: {tokens}"

    def _growth(self, own: float, size: float) -> float:
        """Bytes of weights and cache that a dense model of ``size`` parameters has more."""
        cached = cache_bytes(configuration(self.hidden, 1, self.prefix))
        return 4 * (size - own) + cached * (math.sqrt(size / own) - 1)

    def _decode(self, run: ClaimRun, grown: float) -> dict[str, float]:
        """Time four streams beside the dense models around the one so many times as big.

        Returns seconds of a token.
        """
        run.progress("decoding", 0.95)
        width = self.hidden * math.sqrt(grown)
        below, share = 32 * int(width // 32), width % 32 / 32
        arms = {
            "streams": (self.hidden, run.pick(4, 1)),
            "below": (below, 1),
            "above": (below + 32, 1),
            "one": (self.hidden, 1),
        }
        decoders = {name: _decoder(configuration(*arm, self.prefix)) for name, arm in arms.items()}
        raced = run.race(decoders, self.rounds, swaps={}, threads=1)
        timed = {name: [one / _TOKENS for one in each] for name, each in raced.items()}
        between = zip(timed["below"], timed["above"], strict=True)
        run.put(
            "latency", timed["streams"], ((1 - share) * low + share * high for low, high in between)
        )
        return {f"{name} ({arms[name][0]} wide)": fmean(seconds) for name, seconds in timed.items()}


def _laws(context: ExperimentContext) -> dict[str, ParallelLaw]:
    """The law of each corpus, fitted to its published losses."""
    from shoal.cost.scaling.parscale import PUBLISHED, fit_parscale

    return context.remember(
        "laws", lambda: {corpus: fit_parscale(points) for corpus, points in PUBLISHED.items()}
    )


def _equal_size(sizes: Sequence[int], losses: Sequence[float], wanted: float) -> float:
    """Parameters of the dense model of a loss, on a line through those that were trained.

    No further than they reach: where the largest is worse, the one that is as good is larger still.
    """
    if wanted >= losses[0]:
        return float(sizes[0])
    if wanted <= min(losses):
        return float(sizes[-1])
    slope, start = np.polyfit([math.log(size) for size in sizes], losses, 1)
    return min(max(math.exp((wanted - start) / slope), sizes[0]), sizes[-1])


_CONTEXT = 128
_TOKENS = 32


class TrainingResult(NamedTuple):
    """Held-out loss, nats a byte, and seconds of a step of the second stage."""

    loss: float
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Stages:
    """How the models are trained; ``faster``: how many times, prefixes and aggregator."""

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


def _decoder(config: ModelConfig) -> Callable[[], object]:
    """Generates tokens of one sequence with the kernels of serving."""
    from shoal.model.generate import generate
    from shoal.serve.engine.build import prepare
    from shoal.train.zoo import random

    model = prepare(serve_job(), random(config))
    return lambda: generate(model, [1, 2, 3, 4], _TOKENS)


def wrong_tokens(config: ModelConfig, seed: int) -> int:
    """Tokens of the engine that are not those of plain generation, in eight requests."""
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
    job = serve_job(kv_tokens=2048, max_step_tokens=32)
    engine, _, _ = engine_of(job, prepare(job, random(config, seed)))
    return sum(
        one != other
        for found, tokens in zip(served(engine, requests(prompts, 12)), want, strict=True)
        for one, other in zip(found, tokens, strict=True)
    )
