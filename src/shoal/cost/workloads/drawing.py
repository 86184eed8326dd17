"""What made-up workloads share: times, lengths and tokens, each a function of its seed.

The i-th request is drawn from a generator of its own, so a longer trace starts with the
shorter one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from shoal.core.errors import require
from shoal.core.random import generator
from shoal.ir import Arrival

Requests = Annotated[int, Ge(1), Le(10_000_000)]
"""How many requests a workload has."""
Positive = Annotated[float, Gt(0), Lt(math.inf)]
"""Requests per second, or how they come in bursts."""
Scale = Annotated[float, Ge(1), Lt(math.inf)]
"""By which lengths are divided."""


class LengthLaw:
    """Log-normal lengths in tokens, clipped to a range.

    Args:
        median: of the distribution before clipping.
        sigma: standard deviation of the logarithm.
        low: shortest.
        high: longest.
    """

    def __init__(self, median: float, sigma: float, low: int, high: int) -> None:
        self.median, self.sigma, self.low, self.high = median, sigma, low, high

    def draw(self, random: np.random.Generator, scale: float = 1.0) -> int:
        """One length, divided by ``scale``; at least 1."""
        length = self.median * math.exp(self.sigma * random.standard_normal())
        return max(1, round(min(max(length, self.low), self.high) / scale))


def check_sizes(count: int | None, vocab_size: int, max_position: int) -> None:
    """Refuse arguments that no request fits.

    Raises:
        ConfigError: one of them is too small.
    """
    require(
        count is None or count >= 1, "workload: count", count, expected="1 or more, or none given"
    )
    require(vocab_size >= 1, "workload: vocab_size", vocab_size, expected="1 or more")
    require(
        max_position >= 2,
        "workload: max_position",
        max_position,
        expected="at least 2: a token of prompt and one of output",
    )


def clipped(prompt: int, output: int, max_position: int) -> tuple[int, int]:
    """Lengths that fit: the output is cut to half of the positions, the prompt to the rest."""
    output = max(1, min(output, max_position // 2))
    return max(1, min(prompt, max_position - output)), output


@functools.lru_cache(maxsize=4)
def _integers(vocab_size: int) -> np.ndarray:
    # One object a token: the millions of tokens of a trace are then pointers only.
    return np.arange(vocab_size).astype(object)


def token_ids(
    number: int, vocab_size: int, seed: int, *, purpose: str, index: int = 0
) -> tuple[int, ...]:
    """``number`` uniform token ids, the same for the same key."""
    random = generator(seed, purpose=f"workload {purpose}", index=index)
    drawn = random.integers(0, vocab_size, number)
    token_ids: tuple[int, ...] = tuple(_integers(vocab_size)[drawn].tolist())
    return token_ids


def times(count: int, rate: float | None, burstiness: float, seed: int) -> list[float]:
    """Arrival times, s from 0: all 0 without a rate, else gaps of a Gamma distribution.

    Args:
        count: how many.
        rate: per second, on average.
        burstiness: standard deviation of a gap over its mean; 1 is a Poisson process.
        seed: seed of the workload.
    """
    if rate is None:
        return [0.0] * count
    random = generator(seed, purpose="workload times")
    shape = burstiness**-2
    gaps = random.gamma(shape, 1 / (rate * shape), count)
    gaps[0] = 0.0
    return [float(at) for at in np.cumsum(gaps)]


def independent(
    options: Any,
    prompts: LengthLaw,
    outputs: LengthLaw,
    *,
    purpose: str,
    count: int | None,
    vocab_size: int,
    max_position: int,
    seed: int,
    prefix: Callable[[np.random.Generator], tuple[int, ...]] | None = None,
) -> list[Arrival]:
    """Requests that know nothing of each other, but may start with a common prefix.

    Args:
        options: a part with requests, rate, burstiness and scale.
        prompts: lengths of prompts, without the prefix.
        outputs: lengths of outputs.
        purpose: keeps the random numbers of two workloads apart.
        count: requests; None takes the part's own number.
        vocab_size: tokens are below it.
        max_position: longest prompt with output.
        seed: seed of the workload.
        prefix: chooses what a prompt starts with.
    """
    check_sizes(count, vocab_size, max_position)
    number = count or options.requests
    results = []
    for index, at in enumerate(times(number, options.rate, options.burstiness, seed)):
        random = generator(seed, purpose=f"workload {purpose} lengths", index=index)
        wanted = prompts.draw(random, options.scale), outputs.draw(random, options.scale)
        start = prefix(random) if prefix else ()
        size, output = clipped(len(start) + wanted[0], wanted[1], max_position)
        own = max(1, size - len(start))
        tail = token_ids(own, vocab_size, seed, purpose=purpose, index=index)
        results.append(Arrival(at, start[: size - own] + tail, output))
    return results
