"""[108] ParScale: parallel streams of the same weights instead of more weights.

- The law fitted to the published losses of 24 models on each of two corpora, beside the paper's.
- Mini-models of bytes with one, two and four streams, three seeds, by the paper's recipe: one
  stream for most tokens, then as many as wanted on the same text in the same order, from the same
  weights; the model of one stream goes on as well. And a wider dense model, trained as long, from
  which follows the size of the one that has the loss of four streams.
- What four streams add to the bytes of weights and cache, beside what the dense model of equal
  loss adds to both; and the time of decoding one token with each. Its width lies between two that
  can be built, and so does its time. Where no dense model that was trained is as good, the widest
  one stands for it: what is saved is then saved at least.
- The same increases at 1.6e9 parameters, by the paper's law and the roofline of an H200.
- Greedy tokens of the serving engine, beside plain generation.

The A/A run has one stream everywhere.

Source: Chen et al., Parallel Scaling Law for Language Models, 2025.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Gt, Lt

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.parscale_runs import (
    Stages,
    TrainingResult,
    cache_bytes,
    configuration,
    count,
    decoded,
    wrong_tokens,
)
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import require
from shoal.core.parts import part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.cost.scaling.parscale import EqualLoss, ParallelLaw

__all__ = ["ParScaleClaim"]

_STREAMS = (1, 2, 4)
_PAPER_K = {"stack": 0.39, "pile": 0.33}


@part
class ParScaleClaim(BaseClaim):
    """The law, the losses of one, two and four streams, and what both ways of growing cost.

    Args:
        seeds: trainings of each model.
        steps: of one training.
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

    rows: ClassVar[tuple[int, ...]] = (108,)

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
        from shoal.cost.scaling.parscale import PUBLISHED

        laws = _laws(run.context)
        fits, away = [], []
        for corpus, points in PUBLISHED.items():
            law = laws[corpus]
            if run.as_baseline:  # streams that are worth nothing
                law = law.model_copy(update={"k": 0.0})
            true = np.array([point.loss for point in points])
            said = np.array([law.loss(point.params, point.streams) for point in points])
            fits.append(1 - float(((true - said) ** 2).sum() / ((true - true.mean()) ** 2).sum()))
            away.append(abs(law.k - _PAPER_K[corpus]))
        rows = [self._at_1b6(law, as_baseline=run.as_baseline) for law in laws.values()]
        run.put("memory_saved_1b6", (row.memory_saved or 0.0 for row in rows))
        run.put("latency_saved_1b6", (row.latency_saved or 0.0 for row in rows))
        run.put("law_r2", fits)
        run.put("law_k", away)
        run.details |= {
            "increases_1b6": [row.model_dump(mode="json") for row in rows],
            "laws": {corpus: law.model_dump(mode="json") for corpus, law in laws.items()},
        }

    def _at_1b6(self, law: ParallelLaw, *, as_baseline: bool) -> EqualLoss:
        """Four streams of 1.6e9 parameters beside the dense model, one request of 256 tokens."""
        from shoal.cost.scaling.parscale import equal_loss
        from shoal.cost.shapes import find
        from shoal.machine.described import load

        if as_baseline:
            law = law.model_copy(update={"k": 0.0})
        shape, machine = find("Qwen2.5-1.5B"), load("1xH200")
        return equal_loss(law, shape, machine, params=1.6e9, streams=(4,), context=256)[0]

    def _train(self, run: ClaimRun) -> None:
        """Losses, and what both ways of growing cost."""
        from shoal.claims.experiments.arch_training import text

        stages = Stages(
            steps=self.steps,
            late=self.late,
            prefix=self.prefix,
            faster=self.faster,
            data=text(run.context.data),
        )

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
        added = 4 * (count(grown) - own)
        more = added + 3 * cache_bytes(grown)
        # What the paper's streams are worth at this size, by its law of code.
        law = _laws(run.context)["stack"]
        line = {num: law.loss(own, num) for num in _STREAMS}
        run.put("loss_2", result[2], result[1], bound=line[2] / line[1])
        run.put("loss_4", result[4], result[1], bound=line[4] / line[1])
        run.put("loss_4_of_2", result[4], result[2], bound=line[4] / line[2])
        bound = self._growth(own, law.effective(own, 4)) / more
        run.put("memory_saved", self._growth(own, equal), more, bound=bound)
        token_s = self._decode(run, equal / own)
        read = 4 * own + cache_bytes(plain[self.hidden])  # bytes of a decoded token
        run.bounds["latency"] = (read + more) / (read + self._growth(own, equal))
        step_s = {
            **{f"{num} streams": fmean(one.step_s for one in arms[num]) for num in _STREAMS},
            **{f"width {width}": fmean(one.step_s for one in wide[width]) for width in wide},
        }
        run.details["training"] = {
            "steps": self.steps,
            "late": self.late,
            "loss": result,
            "dense_loss": dense,
            "parameters": sizes,
            "step_s": step_s,
            "dense_of_equal_loss": equal,
            "widest_is_worse": equal == sizes[self.wider[-1]],
            "width_of_equal_loss": self.hidden * math.sqrt(equal / own),
            "increase_bytes": {
                "streams": more,
                "of_prefixes_and_aggregator": added,
                "dense": self._growth(own, equal),
            },
            "token_s": token_s,
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
        timed = decoded(run, arms, self.prefix, self.rounds)
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

    No further than they reach: where the largest is worse than wanted, the one that is as good is
    larger than it, by an unknown amount.

    Args:
        sizes: parameters of the trained models, rising.
        losses: theirs.
        wanted: the loss.
    """
    if wanted >= losses[0]:
        return float(sizes[0])
    if wanted <= min(losses):
        return float(sizes[-1])
    slope, start = np.polyfit([math.log(size) for size in sizes], losses, 1)
    return min(max(math.exp((wanted - start) / slope), sizes[0]), sizes[-1])
