"""Dropout that is the same on any number of ranks.

Whether a channel of a token is dropped is a hash of (seed, step, layer, site, token, channel),
where a token is named by its row in the global batch and its place in it. So tensor, sequence,
context, data and pipeline parallelism drop the same elements as one process, and a recomputed
pass drops what the first one dropped.

One 64-bit hash serves four channels, 16 bits each, so the share that is dropped is a multiple
of 1 / 65536; kept values are scaled by exactly the share that is kept.

Source: Srivastava et al., Dropout, 2014; Steele, Lea and Flood, Fast Splittable Pseudorandom
Number Generators, 2014 (the hash).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.core.errors import require
from shoal.core.random import seed64

# The two sites of a block: outputs of attention and of the feed-forward layer.
ATTENTION = "attention"
FEED_FORWARD = "feed-forward"

_LANES = 4
_LEVELS = 2**16

# Constants of splitmix64, as signed numbers, since torch has no unsigned shifts.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class Dropout:
    """Share of the outputs of attention and feed-forward that is dropped.

    Raises:
        ConfigError: ``p`` is no such share.
    """

    p: float
    seed: int = 0

    def __post_init__(self) -> None:
        require(0.0 <= self.p < 1.0, "dropout", self.p, expected="a fraction in [0, 1)")

    def at(self, step: int, row: int) -> StepDropout:
        """For sequences ``row``, ``row + 1`` ... of global step ``step``."""
        return StepDropout(self, step, row)


@dataclass(frozen=True)
class StepDropout:
    """Dropout of consecutive sequences of one step."""

    dropout: Dropout
    step: int
    row: int

    def over(self, positions_T: Tensor, length: int, batch: int) -> Drop | None:
        """For tokens [N] = batch x positions, behind each other; None if nothing is dropped.

        Args:
            positions_T: int64 places in a sequence.
            length: tokens of a whole sequence.
            batch: sequences.
        """
        if not self._threshold:
            return None
        rows = torch.arange(self.row, self.row + batch, device=positions_T.device)
        tokens = (rows.unsqueeze(1) * length + positions_T).reshape(-1)
        return Drop(self.dropout.seed, self.step, self._threshold, tokens)

    @property
    def _threshold(self) -> int:
        return min(_LEVELS - 1, round(self.dropout.p * _LEVELS))


@dataclass(frozen=True)
class Drop:
    """Dropout of some tokens of one step.

    Args:
        threshold: of 65536, how many are dropped.
        tokens: int64 [N], numbers of the tokens in the global batch.
    """

    seed: int
    step: int
    threshold: int
    tokens: Tensor

    def of(self, tokens: Tensor) -> Drop:
        """For some of the tokens, given by their numbers in the global batch."""
        return replace(self, tokens=tokens)

    def scale(self, layer: int, site: str, width: int, dtype: torch.dtype) -> Tensor:
        """Factors [N, width]: 0 for what is dropped, else 1 / (1 - p)."""
        key = seed64(self.seed, purpose=f"dropout {site}", step=self.step, layer=layer)
        token_N = _mix(self.tokens * _GOLDEN + key)
        groups = -(-width // _LANES)
        group_G = torch.arange(1, groups + 1, device=token_N.device) * _GOLDEN
        bits = _mix(token_N.unsqueeze(1) + group_G).view(torch.int16)
        # Signed lanes: the lowest ``threshold`` of 65536 values.
        kept = bits[:, :width] >= self.threshold - _LEVELS // 2
        return kept.to(dtype).mul_(_LEVELS / (_LEVELS - self.threshold))

    def add(self, residual: Tensor, x: Tensor, layer: int, site: str) -> Tensor:
        """``residual + dropout(x)``, both [N, D] or [B, T, D]."""
        scale = self.scale(layer, site, x.shape[-1], x.dtype)
        return torch.addcmul(residual, x, scale.view_as(x))


def uniform(tokens_N: Tensor, key: int) -> Tensor:
    """A number in [0, 1) for each token, fp64, which follows from its number and ``key`` alone."""
    bits = _mix(_mix(tokens_N * _GOLDEN + key) + _GOLDEN)
    return ((bits >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64, in place: every bit depends on every bit."""
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        # Signed shifts copy the sign; the mask takes that away.
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            z *= factor
    return z
