"""Ways to make the cache of a long context smaller, along the four axes that it is a product of.

A cache is layers x heads x tokens x width of numbers. Each way takes a factor off one of them,
helps some of the four numbers of :mod:`shoal.cost.longctx.peak`, and breaks something. Ways
compose: their factors multiply. The factors are those of the method's own definition, not of a
measurement.

Source: Fu, Challenges in Deploying Long-Context Transformers, 2024, section 4 and table 1; of each
way, the paper named beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from shoal.core.errors import ConfigError, require, suggestion
from shoal.cost.longctx.peak import LongContext, LongModel
from shoal.ir import ModelShape

Axis = Literal["layers", "heads", "tokens", "hidden"]
AXES: tuple[Axis, ...] = ("layers", "heads", "tokens", "hidden")

_Factor = Callable[[ModelShape, float, float], float]


@dataclass(frozen=True, slots=True)
class Reduction:
    """One way.

    Args:
        axis: which of the four factors of a cache it reduces.
        argument: what ``NAME=NUMBER`` means.
        default: the number, where only the name is given.
        most: the largest number that means something.
        factor: (shape, tokens of context, the number) -> what multiplies the cache, in (0, 1].
        breaks: what it costs beside bytes.
        source: the paper.
        bounds_sight: the number is also how many tokens one of a prompt sees.
    """

    name: str
    axis: Axis
    argument: str
    default: float
    most: float
    factor: _Factor
    breaks: str
    source: str
    bounds_sight: bool = False


def _share(shape: ModelShape, tokens: float, number: float) -> float:
    return number


def _kv_heads(shape: ModelShape, tokens: float, number: float) -> float:
    return min(1.0, number / shape.num_kv_heads)


# fmt: off
_WAYS = (
    Reduction("share", "layers", "layers that share one cache", 2, inf,
              lambda shape, tokens, number: 1 / min(number, shape.num_layers),
              "must be trained so; retrieval suffers as more layers share",
              "Brandon et al., Cross-Layer Attention, 2024"),
    Reduction("yoco", "layers", "layers that keep a cache of the whole context", 1, inf,
              lambda shape, tokens, number: min(1.0, number / shape.num_layers),
              "must be trained so; the other layers see a window or that one cache",
              "Sun et al., You Only Cache Once, 2024"),
    Reduction("gqa", "heads", "key/value heads", 8, inf, _kv_heads,
              "must be trained so, or finetuned from all heads",
              "Ainslie et al., GQA, 2023"),
    Reduction("mqa", "heads", "key/value heads", 1, inf, _kv_heads,
              "must be trained so; quality falls, and tensor parallelism copies the head",
              "Shazeer, Fast Transformer Decoding, 2019"),
    Reduction("retrieval_heads", "heads", "share of heads that keep the whole context", 0.05, 1,
              _share, "those heads must be known; what others would have looked up is lost",
              "Wu et al., Retrieval Head, 2024"),
    Reduction("window", "tokens", "last tokens that are kept", 4096, inf,
              lambda shape, tokens, number: min(1.0, number / tokens),
              "whatever lies before the window cannot be looked up",
              "Xiao et al., StreamingLLM, 2023", bounds_sight=True),
    Reduction("evict", "tokens", "share of tokens that are kept", 0.2, 1, _share,
              "what is evicted is lost; scores of all tokens must be watched",
              "Zhang et al., H2O, 2023"),
    Reduction("merge", "tokens", "share of tokens that are left after merging", 0.25, 1, _share,
              "must be finetuned so; single tokens blur",
              "Nawrot et al., Dynamic Memory Compression, 2024"),
    Reduction("latent", "hidden", "numbers of one token in one layer, in place of keys and values",
              576, inf,
              lambda shape, tokens, number: min(
                  1.0, number / (2 * shape.num_kv_heads * shape.head_dim)),
              "must be trained so; more FLOP a token, and every rank keeps all of it",
              "DeepSeek-AI, DeepSeek-V2, 2024"),
    Reduction("bits", "hidden", "bits of a number, of 16", 4, 16,
              lambda shape, tokens, number: number / 16,
              "below 4 bits quality falls; numbers must be decoded on the way",
              "Liu et al., KIVI, 2024"),
)
# fmt: on
REDUCTIONS = {one.name: one for one in _WAYS}


@dataclass(frozen=True, slots=True)
class ReductionChoice:
    """A way with its number."""

    way: Reduction
    number: float

    def __str__(self) -> str:
        return f"{self.way.name}={self.number:g}"


def choose(words: Sequence[str]) -> tuple[ReductionChoice, ...]:
    """The ways that ``name`` or ``name=number`` spell; one of each axis at most.

    Raises:
        ConfigError: an unknown way, a wrong number, or two of one axis.
    """
    reduction_choices: list[ReductionChoice] = []
    for word in words:
        name, given, number = word.partition("=")
        if name not in REDUCTIONS:
            raise ConfigError(
                f"reduce = {word!r}: expected one of {', '.join(REDUCTIONS)}"
                + suggestion(name, REDUCTIONS)
            )
        way = REDUCTIONS[name]
        try:
            value = float(number) if given else way.default
        except ValueError:
            value = -1.0
        require(
            0 < value < inf and value <= way.most,
            f"reduce.{name}",
            number,
            expected=f"{way.argument}: a number above 0"
            + (f", up to {way.most:g}" if way.most < inf else ""),
        )
        for other in reduction_choices:
            require(
                other.way.axis != way.axis,
                "reduce",
                f"{other}, {word}",
                expected=f"one way of an axis; both reduce {way.axis}",
            )
        reduction_choices.append(ReductionChoice(way, value))
    return tuple(reduction_choices)


def factor_of(chosen: Sequence[ReductionChoice], shape: ModelShape, tokens: float) -> float:
    """What all of them together leave of a cache."""
    left = 1.0
    for one in chosen:
        left *= one.way.factor(shape, tokens, one.number)
    return left


def reduced(
    model: LongModel, chosen: Sequence[ReductionChoice], shape: ModelShape, tokens: float
) -> LongModel:
    """The model with a smaller cache; at contexts of ``tokens``, where it depends on them.

    What bounds the tokens that one sees makes a window; it is not a smaller cache beside that.
    """
    window = next((int(one.number) for one in chosen if one.way.bounds_sight), model.window)
    others = [one for one in chosen if not one.way.bounds_sight]
    kept = model.kv_bytes * factor_of(others, shape, tokens)
    return replace(model, kv_bytes=kept, window=window)


def reaching(
    setting: LongContext, shape: ModelShape, *, long: float, short: float
) -> list[tuple[float, tuple[ReductionChoice, ...]]]:
    """Ways and compositions that make a cache at ``long`` as small as it is at ``short``.

    One way of each axis at most, each with its default number. (What is left, ways), those of
    the fewest ways first; of others only if none of their parts is enough.
    """
    wanted = next(one.factor for one in setting.needed(long, short) if one.of == "cache")
    by_axis: list[list[ReductionChoice | None]] = [
        [
            None,
            *(ReductionChoice(one, one.default) for one in REDUCTIONS.values() if one.axis == axis),
        ]
        for axis in AXES
    ]
    results: list[tuple[float, tuple[ReductionChoice, ...]]] = []
    sets = [tuple(one for one in some if one is not None) for some in itertools.product(*by_axis)]
    for some in sorted(sets, key=len):
        left = factor_of(some, shape, long)
        # Not where a part of it is enough, or where a member changes nothing.
        if left > wanted or any(set(fewer) < set(some) for _, fewer in results):
            continue
        if all(one.way.factor(shape, long, one.number) < 1 for one in some):
            results.append((left, some))
    return sorted(results, key=lambda one: (len(one[1]), one[0]))
