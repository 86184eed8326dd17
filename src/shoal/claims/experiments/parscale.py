"""[108] ParScale: parallel streams of the same weights instead of more weights.

- The law fitted to the published losses of 24 models on each of two corpora, beside the paper's.
- Mini-models of bytes with one, two and four streams, from the same weights on the same text in the
  same order, three seeds; and wider dense models, of which the size follows that has the loss of
  four streams.
- What four streams add to the bytes of weights and cache, beside what the dense model of equal
  loss adds to both; and the time of decoding one token with each. Its width lies between two that
  can be built, and so does its time.
- The same increases at 1.6e9 parameters, by the paper's law and the roofline of an H200.
- Greedy tokens of the serving engine, beside plain generation.

The A/A run has one stream everywhere.

Source: Chen et al., Parallel Scaling Law for Language Models, 2025.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import JsonValue

from shoal.claims.protocols import Attempt, Context, Metric, Paired, Samples
from shoal.core.errors import require
from shoal.core.measure import interleave
from shoal.core.parts import part
from shoal.core.random import generator

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.cost.parscale import EqualLoss, ParallelLaw
    from shoal.model.config import ModelConfig

__all__ = ["ParScaleClaim"]

_STREAMS = (1, 2, 4)
_PAPER_K = {"stack": 0.39, "pile": 0.33}
_CONTEXT = 128


@part
class ParScaleClaim:
    """The law, the losses of one, two and four streams, and what both ways of growing cost.

    Args:
        seeds: trainings of each model.
        steps: of one training.
        hidden: width of the model with streams.
        wider: widths of the dense models that it is compared with.
        prefix: virtual tokens of a stream.
        rounds: timed rounds of decoding.
    """

    seeds: int = 3
    steps: int = 250
    hidden: int = 160
    wider: tuple[int, ...] = (192, 224)
    prefix: int = 48
    rounds: int = 20

    rows: ClassVar[tuple[int, ...]] = (108,)
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="law_r2",
            unit="1",
            statistic="min",
            comparison=">=",
            threshold=0.997,
            baseline="one stream",
            evidence="arithmetic",
            paper="R2 of 0.998 on both corpora",
        ),
        Metric(
            name="law_k",
            unit="1",
            statistic="max",
            comparison="<=",
            threshold=0.005,
            baseline="one stream",
            evidence="arithmetic",
            paper="k = 0.39 and 0.33",
        ),
        Metric(
            name="memory_saved_1b6",
            unit="x",
            statistic="min",
            comparison=">=",
            threshold=5.0,
            baseline="four streams' increase",
            evidence="arithmetic",
            paper="up to 22 times less memory increase",
        ),
        Metric(
            name="latency_saved_1b6",
            unit="x",
            statistic="min",
            comparison=">=",
            threshold=1.0,
            baseline="four streams' increase",
            evidence="arithmetic",
            paper="up to 6 times less latency increase",
        ),
        Metric.counted("wrong_tokens", "<=", 0.0, "plain generation"),
        Metric(
            name="loss_2",
            unit="x",
            statistic="ratio",
            comparison="<=",
            threshold=0.9999,
            baseline="one stream",
            evidence="mechanism",
            quick=False,
        ),
        Metric(
            name="loss_4_of_2",
            unit="x",
            statistic="ratio",
            comparison="<=",
            threshold=0.9999,
            baseline="two streams",
            evidence="mechanism",
            quick=False,
        ),
        Metric(
            name="loss_4",
            unit="x",
            statistic="ratio",
            comparison="<=",
            threshold=0.995,
            baseline="one stream",
            evidence="mechanism",
            quick=False,
            paper="1 to 4 streams as 1.5 times the parameters",
        ),
        Metric(
            name="memory_saved",
            unit="x",
            statistic="ratio",
            comparison=">=",
            threshold=5.0,
            baseline="four streams' increase",
            evidence="mechanism",
            quick=False,
            paper="up to 22 times less memory increase",
        ),
        Metric(
            name="latency",
            unit="x",
            statistic="ratio",
            comparison="<=",
            threshold=1.0,
            baseline="the dense model of equal loss",
            evidence="mechanism",
            timing=True,
            paper="up to 6 times less latency increase",
        ),
    )
    attempts: ClassVar[tuple[Attempt, ...]] = ()

    def __post_init__(self) -> None:
        for name in ("seeds", "steps", "hidden", "prefix", "rounds"):
            value = getattr(self, name)
            require(value >= 1, f"claim.parscale.{name}", value, expected="at least 1")
        require(
            len(self.wider) >= 1 and min(self.wider) > self.hidden,
            "claim.parscale.wider",
            self.wider,
            expected=f"widths above hidden = {self.hidden}",
        )

    def refuses(self, context: Context) -> str | None:
        """Small models run everywhere."""
        return None

    def run(self, context: Context, *, quick: bool, as_baseline: bool = False) -> Samples:
        """Fit the law and compare tokens; then, unless it is quick, train and decode."""
        metrics: dict[str, Paired] = {}
        details: dict[str, JsonValue] = {}
        self._law(metrics, details, as_baseline=as_baseline)
        streams = 1 if as_baseline else 4
        wrong = _wrong_tokens(self._config(self.hidden, streams), context.seed)
        metrics["wrong_tokens"] = Paired(method=(float(wrong),))
        if not quick:
            self._train(context, metrics, details, as_baseline=as_baseline)
        return Samples(metrics=metrics, details=details)

    def _config(self, hidden: int, streams: int) -> ModelConfig:
        from shoal.claims.experiments.arch_training import mini

        wanted: dict[str, Any] = {"num": streams, "prefix": self.prefix}
        # One head of keys and values, as the paper's models have few.
        return mini(
            hidden, 4, ffn=16 * hidden // 5, num_kv_heads=1, architecture={"streams": wanted}
        )

    def _law(
        self, metrics: dict[str, Paired], details: dict[str, JsonValue], *, as_baseline: bool
    ) -> None:
        from shoal.cost.parscale import PUBLISHED, fit_parscale

        laws = {corpus: fit_parscale(points) for corpus, points in PUBLISHED.items()}
        fits, away = [], []
        for corpus, points in PUBLISHED.items():
            law = laws[corpus]
            if as_baseline:  # streams that are worth nothing
                law = law.model_copy(update={"k": 0.0})
            true = np.array([point.loss for point in points])
            said = np.array([law.loss(point.params, point.streams) for point in points])
            fits.append(1 - float(((true - said) ** 2).sum() / ((true - true.mean()) ** 2).sum()))
            away.append(abs(law.k - _PAPER_K[corpus]))
        rows = [self._at_1b6(law, as_baseline=as_baseline) for law in laws.values()]
        metrics["memory_saved_1b6"] = Paired(method=tuple(row.memory_saved or 0.0 for row in rows))
        metrics["latency_saved_1b6"] = Paired(
            method=tuple(row.latency_saved or 0.0 for row in rows)
        )
        details["increases_1b6"] = [row.model_dump() for row in rows]
        metrics["law_r2"] = Paired(method=tuple(fits))
        metrics["law_k"] = Paired(method=tuple(away))
        details["laws"] = {corpus: law.model_dump() for corpus, law in laws.items()}

    def _at_1b6(self, law: ParallelLaw, *, as_baseline: bool) -> EqualLoss:
        """Four streams of 1.6e9 parameters beside the dense model, one request of 256 tokens."""
        from shoal.cost.parscale import equal_loss
        from shoal.cost.shapes import find
        from shoal.machine.described import load

        if as_baseline:
            law = law.model_copy(update={"k": 0.0})
        shape, machine = find("Qwen2.5-1.5B"), load("1xH200")
        return equal_loss(law, shape, machine, params=1.6e9, streams=(4,), context=256)[0]

    def _train(
        self,
        context: Context,
        metrics: dict[str, Paired],
        details: dict[str, JsonValue],
        *,
        as_baseline: bool,
    ) -> None:
        import torch

        from shoal.claims.experiments.arch_training import Recipe, heldout, text, train
        from shoal.train.zoo import random

        data = context.remember("text", lambda: text(context.data))
        recipe = Recipe(steps=self.steps)

        def loss(hidden: int, streams: int, seed: int) -> float:
            def run() -> float:
                model = random(self._config(hidden, streams), seed)
                return heldout(train(model, data.train, recipe, seed), data.heldout, recipe)

            context.progress(f"width {hidden}, {streams} streams, seed {seed}", 0.1 + 0.2 * seed)
            return context.remember(f"loss {hidden} {streams} {seed}", run)

        seeds = range(context.seed, context.seed + self.seeds)
        found = {
            num: tuple(loss(self.hidden, 1 if as_baseline else num, seed) for seed in seeds)
            for num in _STREAMS
        }
        one = tuple(loss(self.hidden, 1, seed) for seed in seeds)
        dense = {width: tuple(loss(width, 1, seed) for seed in seeds) for width in self.wider}
        metrics["loss_2"] = Paired(method=found[2], baseline=one)
        metrics["loss_4"] = Paired(method=found[4], baseline=one)
        metrics["loss_4_of_2"] = Paired(method=found[4], baseline=found[2])

        sizes = {width: _count(self._config(width, 1)) for width in (self.hidden, *self.wider)}
        slope, start = np.polyfit(
            [math.log(sizes[width]) for width in sizes],
            [fmean(one), *(fmean(dense[width]) for width in self.wider)],
            1,
        )
        equal = max(sizes[self.hidden], math.exp((fmean(found[4]) - start) / slope))
        width = self.hidden * math.sqrt(equal / sizes[self.hidden])
        grown = self._config(self.hidden, 4)
        more = 4 * (_count(grown) - sizes[self.hidden]) + 3 * _cache_bytes(grown)
        below, share = 32 * int(width // 32), width % 32 / 32
        around = self._config(below, 1), self._config(below + 32, 1)
        cached = (1 - share) * _cache_bytes(around[0]) + share * _cache_bytes(around[1])
        growth = 4 * (equal - sizes[self.hidden]) + cached - _cache_bytes(grown)
        metrics["memory_saved"] = Paired(method=(growth,), baseline=(float(more),))
        threads = torch.get_num_threads()
        timed = interleave(
            {
                "streams": _decoder(self._config(self.hidden, 1 if as_baseline else 4)),
                "below": _decoder(around[0]),
                "above": _decoder(around[1]),
                "one": _decoder(self._config(self.hidden, 1)),
            },
            self.rounds,
            seed=context.seed,
        ).seconds
        torch.set_num_threads(threads)
        between = zip(timed["below"], timed["above"], strict=True)
        as_good = tuple((1 - share) * low + share * high for low, high in between)
        metrics["latency"] = Paired(method=timed["streams"], baseline=as_good)
        details["training"] = {
            "steps": self.steps,
            "loss": {str(num): [*losses] for num, losses in found.items()},
            "dense_loss": {str(width): [*losses] for width, losses in dense.items()},
            "parameters": {str(width): size for width, size in sizes.items()},
            "dense_of_equal_loss": equal,
            "width_of_equal_loss": width,
            "increase_bytes": {
                "streams": more,
                "of_prefixes_and_aggregator": 4 * (_count(grown) - sizes[self.hidden]),
                "dense": growth,
            },
            "token_s": {name: fmean(seconds) / 32 for name, seconds in timed.items()},
        }


def _count(config: ModelConfig) -> int:
    from shoal.cost.arithmetic import parameters

    return parameters(config.shape())


def _cache_bytes(config: ModelConfig) -> int:
    """Bytes of the keys and values of one stream's context, in fp32."""
    return 4 * _CONTEXT * 2 * config.num_layers * config.num_kv_heads * config.head_dim


def _decoder(config: ModelConfig) -> Callable[[], object]:
    """Decode 32 tokens of one sequence with the kernels of serving, on one thread."""
    from shoal.ir import ServeJob
    from shoal.model.generate import generate
    from shoal.serve.build import prepare
    from shoal.train.zoo import random

    model = prepare(ServeJob(model="mini", precision="fp32", threads=1), random(config))
    return lambda: generate(model, [1, 2, 3, 4], 32)


def _wrong_tokens(config: ModelConfig, seed: int) -> int:
    """Tokens of the engine that are not those of plain generation, in eight requests."""
    from shoal.ir import Request, SamplingParams, ServeJob
    from shoal.model.generate import generate
    from shoal.serve.build import engine_of, prepare
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
    requests = [
        Request(f"{number}", [*prompt], len(prompt), SamplingParams(max_tokens=12))
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    return sum(
        one != other
        for request, tokens in zip(requests, want, strict=True)
        for one, other in zip(request.tokens[request.n_prompt :], tokens, strict=True)
    )
