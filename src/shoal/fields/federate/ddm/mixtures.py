"""Which experts work in a step of the sampler: all, the likeliest, the m likeliest, or one drawn.

Source: McAllister et al., Decentralized Diffusion Models, 2025, section 3.3. Shapes: N samples, K
experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor


@part
class Full:
    """Every expert, weighted by its probability: the velocity of the whole data set."""

    def active(self, experts: int) -> int:
        """All."""
        return experts

    def weights(self, probabilities: Tensor, draw: np.random.Generator) -> Tensor:
        """The probabilities."""
        return probabilities


@part
class TopOne:
    """The likeliest expert alone: a step costs as much as one of a single model."""

    def active(self, experts: int) -> int:
        """One."""
        return 1

    def weights(self, probabilities: Tensor, draw: np.random.Generator) -> Tensor:
        """1 for the likeliest."""
        best = probabilities.argmax(-1, keepdim=True)
        return probabilities.new_zeros(probabilities.shape).scatter_(-1, best, 1.0)


@part
class TopM:
    """The likeliest experts, their probabilities made to sum to 1.

    Args:
        m: how many; all if there are fewer.
    """

    m: Annotated[int, Ge(1)] = 2

    def active(self, experts: int) -> int:
        """At most m."""
        return min(self.m, experts)

    def weights(self, probabilities: Tensor, draw: np.random.Generator) -> Tensor:
        """Zero for all but m."""
        best, where = probabilities.topk(min(self.m, probabilities.shape[-1]), -1)
        share = best / best.sum(-1, keepdim=True)
        return probabilities.new_zeros(probabilities.shape).scatter_(-1, where, share)


@part
class SampledExpert:
    """One expert in each step, drawn with the router's probabilities: right in expectation."""

    def active(self, experts: int) -> int:
        """One."""
        return 1

    def weights(self, probabilities: Tensor, draw: np.random.Generator) -> Tensor:
        """1 for the one that is drawn."""
        # In float64, where a number below 1 is not rounded to 1.
        cumulative = probabilities.double().cumsum(-1)
        u = cumulative.new_tensor(draw.random((len(probabilities), 1)))
        drawn = (cumulative <= u * cumulative[:, -1:]).sum(-1, keepdim=True)
        return probabilities.new_zeros(probabilities.shape).scatter_(-1, drawn, 1.0)
