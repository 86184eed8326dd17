"""A step's time by its phase: one line for prompts, one for decodes, one for large batches.

A prompt's step takes ``a + b * tokens + c * tokens^2`` and a decode's ``a + b * context +
c * requests``, with other coefficients from some number of requests on, where arithmetic
begins to count. A step of both reads the weights once: it takes the larger of the constants and
the rest of both lines.

Source: Zhong et al., DistServe, 2024, appendix A.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from shoal.core.config import Value
from shoal.core.errors import ConfigError, require


class PromptLine(Value):
    """Seconds of any step, of a token, and of a token squared, summed over prompts."""

    step: NonNegativeFloat
    token: NonNegativeFloat
    square: NonNegativeFloat


class DecodeLine(Value):
    """Seconds of any step, of a token of context and of a request, summed over requests."""

    step: NonNegativeFloat
    key: NonNegativeFloat
    request: NonNegativeFloat


class Phased(Value):
    """Seconds of a step by lines for its phases; from ``large_from`` requests on by ``large``."""

    prefill: PromptLine
    decode: DecodeLine
    large: DecodeLine | None = None
    large_from: PositiveInt | None = None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.large is None) != (self.large_from is None):
            raise ConfigError(
                "phased.large and phased.large_from: expected both or neither, the line of large "
                "batches and from how many requests on it holds"
            )
        return self

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See :class:`~shoal.ir.engine.StepCost`."""
        tokens, squares, keys, requests = _sums(chunks)
        prefill, decode = self.prefill, self.decode
        if self.large is not None and self.large_from is not None and requests >= self.large_from:
            decode = self.large
        prompts = prefill.token * tokens + prefill.square * squares
        decodes = decode.key * keys + decode.request * requests
        if not tokens:
            return decode.step + decodes
        if not requests:
            return prefill.step + prompts
        return max(prefill.step, decode.step) + prompts + decodes


def _sums(chunks: Sequence[tuple[int, int]]) -> tuple[int, int, int, int]:
    """(prompt tokens, their squares, keys that decodes read, decodes)."""
    tokens = squares = keys = requests = 0
    for start, length in chunks:
        if length == 1:
            keys += start + 1
            requests += 1
        else:
            tokens += length
            # What a prompt's part adds to the square of what is computed of it.
            squares += length * (2 * start + length)
    return tokens, squares, keys, requests


def _decodes(what: str, rows: Sequence[tuple[float, ...]]) -> DecodeLine:
    step, key, request = _line(what, rows)
    return DecodeLine(step=step, key=key, request=request)


def _line(what: str, rows: Sequence[tuple[float, ...]]) -> tuple[float, float, float]:
    import numpy as np
    from scipy.optimize import nnls

    require(
        len(rows) >= 6,
        f"samples of {what}",
        len(rows),
        expected="at least 6 measured steps",
        hint="profile more shapes",
    )
    table = np.array(rows, dtype=float)
    weighted = table[:, :3] / table[:, 3:]
    size = np.abs(weighted).max(axis=0)
    size[size == 0] = 1.0
    result, _ = nnls(weighted / size, np.ones(len(rows)))
    step, first, second = map(float, result / size)
    return step, first, second
