"""A step's time as a line fitted to measured steps.

Seconds are a sum of non-negative coefficients times what a step consists of: itself, its
tokens, the pairs of a query and a key inside its prompts, the keys that its decodes read,
and its chunks. The fit is by non-negative least squares on relative errors, so that a
short step counts as much as a long one.

Source: Lawson and Hanson, Solving Least Squares Problems, 1974 (NNLS).
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import NonNegativeFloat, NonNegativeInt

from shoal.core.config import Value
from shoal.core.errors import ConfigError, require

FEATURES = ("step", "token", "prompt_pair", "decode_key", "chunk")
"""What a step is made of, in the order of the coefficients."""

# Measured steps that a fit needs: twice its coefficients.
FEWEST = 2 * len(FEATURES)


class StepSample(Value):
    """One measured step.

    Args:
        chunks: (tokens before it, tokens in it) of each chunk.
        seconds: how long it took.
        pause_s: s for which there was nothing to do before it.
    """

    chunks: tuple[tuple[int, int], ...]
    seconds: float
    pause_s: NonNegativeFloat = 0.0


class FittedStepCost(Value):
    """Seconds of a step by a fitted line.

    Args:
        step: s of any step.
        token: s of a token.
        prompt_pair: s of a query and a key in a prompt's chunk of more than one token.
        decode_key: s of a key that a chunk of one token reads.
        chunk: s of a chunk.
        error_p50: median of the samples' absolute relative errors.
        error_p90: their 90th percentile.
        samples: how many steps it was fitted to.
        precision: dtype of weights and cache.
        threads: threads that computed.
    """

    step: NonNegativeFloat
    token: NonNegativeFloat
    prompt_pair: NonNegativeFloat
    decode_key: NonNegativeFloat
    chunk: NonNegativeFloat
    error_p50: NonNegativeFloat = 0.0
    error_p90: NonNegativeFloat = 0.0
    samples: NonNegativeInt = 0
    machine: str = ""
    model: str = ""
    precision: str = ""
    threads: NonNegativeInt = 0

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        one, tokens, pairs, keys, number = features(chunks)
        return (
            self.step * one
            + self.token * tokens
            + self.prompt_pair * pairs
            + self.decode_key * keys
            + self.chunk * number
        )


def features(chunks: Sequence[tuple[int, int]]) -> tuple[float, float, float, float, float]:
    """What a step of ``chunks`` (tokens before, tokens in it) consists of; see FEATURES."""
    tokens, pairs, keys = 0, 0.0, 0
    for start, length in chunks:
        tokens += length
        if length == 1:
            keys += start + 1
        else:
            # Token i of the chunk attends to the start + i + 1 tokens up to itself.
            pairs += length * (start + (length + 1) / 2)
    return 1.0, float(tokens), pairs, float(keys), float(len(chunks))


def fit(
    samples: Sequence[StepSample],
    *,
    machine: str = "",
    model: str = "",
    precision: str = "",
    threads: NonNegativeInt = 0,
) -> FittedStepCost:
    """The line that fits measured steps best, by their relative errors.

    Raises:
        ConfigError: too few samples, or one whose time is not positive.
    """
    import numpy as np
    from scipy.optimize import nnls

    require(
        len(samples) >= FEWEST,
        "samples",
        len(samples),
        expected=f"at least {FEWEST} measured steps",
        hint="profile more shapes",
    )
    for index, sample in enumerate(samples):
        if not sample.seconds > 0 or not sample.chunks:
            raise ConfigError(
                f"samples[{index}]: {len(sample.chunks)} chunks in {sample.seconds} s: expected at "
                "least one chunk and a positive time; leave empty steps out"
            )
    rows = np.array([features(sample.chunks) for sample in samples])
    measured = np.array([sample.seconds for sample in samples])
    weighted = rows / measured[:, None]
    # Columns differ by many orders of magnitude; equal sizes condition the problem.
    size = np.abs(weighted).max(axis=0)
    size[size == 0] = 1.0
    result, _ = nnls(weighted / size, np.ones(len(samples)))
    coefficients = result / size
    errors = np.abs(rows @ coefficients / measured - 1)
    return FittedStepCost(
        **dict(zip(FEATURES, map(float, coefficients), strict=True)),
        error_p50=float(np.percentile(errors, 50)),
        error_p90=float(np.percentile(errors, 90)),
        samples=len(samples),
        machine=machine,
        model=model,
        precision=precision,
        threads=threads,
    )


def scaled(line: FittedStepCost, factor: float) -> FittedStepCost:
    """A line by which every step takes so many times as long."""
    return line.model_copy(update={name: factor * getattr(line, name) for name in FEATURES})
