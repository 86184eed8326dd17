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
from typing import Literal

from shoal.core.errors import ConfigError, nearest, require
from shoal.cost.longctx.peak import LongContext, LongModel
from shoal.ir import ModelShape

__all__ = [
    "AXES",
    "REDUCTIONS",
    "Reduction",
    "ReductionChoice",
    "choose",
    "factor_of",
    "reaching",
    "reduced",
]

Axis = Literal["layers", "heads", "tokens", "hidden"]
AXES: tuple[Axis, ...] = ("layers", "heads", "tokens", "hidden")

Improves = Literal["concurrency", "prefill", "decode", "switch"]
_CACHE: tuple[Improves, ...] = ("concurrency", "decode", "switch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One way.

    Args:
        name: as the field calls it.
        axis: which of the four factors of a cache it reduces.
        argument: what ``NAME=NUMBER`` means.
        default: the number, where only the name is given.
        factor: (shape, tokens of context, the number) -> what multiplies the cache, in (0, 1].
        improves: which of the four numbers.
        breaks: what it costs beside bytes.
        source: the paper.
    """

    name: str
    axis: Axis
    argument: str
    default: float
    factor: Callable[[ModelShape, float, float], float]
    improves: tuple[Improves, ...]
    breaks: str
    source: str


def _of(*reductions: Reduction) -> dict[str, Reduction]:
    return {one.name: one for one in reductions}


REDUCTIONS = _of(
    Reduction(
        name="share",
        axis="layers",
        argument="layers that share one cache",
        default=2,
        factor=lambda shape, tokens, number: 1 / min(number, shape.num_layers),
        improves=_CACHE,
        breaks="must be trained so; retrieval suffers as more layers share",
        source="Brandon et al., Cross-Layer Attention, 2024",
    ),
    Reduction(
        name="yoco",
        axis="layers",
        argument="layers that keep a cache of the whole context",
        default=1,
        factor=lambda shape, tokens, number: min(1.0, number / shape.num_layers),
        improves=("concurrency", "prefill", "decode", "switch"),
        breaks="must be trained so; the other layers see a window or that one cache",
        source="Sun et al., You Only Cache Once, 2024",
    ),
    Reduction(
        name="gqa",
        axis="heads",
        argument="key/value heads",
        default=8,
        factor=lambda shape, tokens, number: min(1.0, number / shape.num_kv_heads),
        improves=_CACHE,
        breaks="must be trained so, or finetuned from all heads",
        source="Ainslie et al., GQA, 2023",
    ),
    Reduction(
        name="mqa",
        axis="heads",
        argument="key/value heads",
        default=1,
        factor=lambda shape, tokens, number: min(1.0, number / shape.num_kv_heads),
        improves=_CACHE,
        breaks="must be trained so; quality falls, and tensor parallelism copies the head",
        source="Shazeer, Fast Transformer Decoding, 2019",
    ),
    Reduction(
        name="retrieval_heads",
        axis="heads",
        argument="share of heads that keep the whole context",
        default=0.05,
        factor=lambda shape, tokens, number: number,
        improves=_CACHE,
        breaks="those heads must be known; what others would have looked up is lost",
        source="Wu et al., Retrieval Head, 2024",
    ),
    Reduction(
        name="window",
        axis="tokens",
        argument="last tokens that are kept",
        default=4096,
        factor=lambda shape, tokens, number: min(1.0, number / tokens),
        improves=("concurrency", "prefill", "decode", "switch"),
        breaks="whatever lies before the window cannot be looked up",
        source="Xiao et al., StreamingLLM, 2023",
    ),
    Reduction(
        name="evict",
        axis="tokens",
        argument="share of tokens that are kept",
        default=0.2,
        factor=lambda shape, tokens, number: number,
        improves=_CACHE,
        breaks="what is evicted is lost; scores of all tokens must be watched",
        source="Zhang et al., H2O, 2023",
    ),
    Reduction(
        name="merge",
        axis="tokens",
        argument="share of tokens that are left after merging",
        default=0.25,
        factor=lambda shape, tokens, number: number,
        improves=_CACHE,
        breaks="must be finetuned so; single tokens blur",
        source="Nawrot et al., Dynamic Memory Compression, 2024",
    ),
    Reduction(
        name="latent",
        axis="hidden",
        argument="numbers of one token in one layer, in place of keys and values",
        default=576,
        factor=lambda shape, tokens, number: min(
            1.0, number / (2 * shape.num_kv_heads * shape.head_dim)
        ),
        improves=_CACHE,
        breaks="must be trained so; more FLOP a token, and every rank keeps all of it",
        source="DeepSeek-AI, DeepSeek-V2, 2024",
    ),
    Reduction(
        name="bits",
        axis="hidden",
        argument="bits of a number, of 16",
        default=4,
        factor=lambda shape, tokens, number: number / 16,
        improves=_CACHE,
        breaks="below 4 bits quality falls; numbers must be decoded on the way",
        source="Liu et al., KIVI, 2024",
    ),
)


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
            hint = nearest(name, REDUCTIONS)
            raise ConfigError(
                f"reduce = {word!r}: expected one of {', '.join(REDUCTIONS)}"
                + (f"; {hint}" if hint else "")
            )
        way = REDUCTIONS[name]
        try:
            value = float(number) if given else way.default
        except ValueError:
            value = -1.0
        share = "share of" in way.argument
        require(
            0 < value < float("inf")
            and (not share or value <= 1)
            and (name != "bits" or value <= 16),
            f"reduce.{name}",
            number,
            expected=f"{way.argument}: a number above 0" + (", up to 1" if share else ""),
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

    A window also bounds what a prompt's tokens see.
    """
    window = model.window
    others = []
    for one in chosen:
        if one.way.name == "window":
            window = int(one.number)
        else:
            others.append(one)
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
