"""Averaging in which a message has some of the tensors only.

Source: Hegedűs, Danner, Jelasity, Decentralized Learning Works: An Empirical Comparison of Gossip
Learning and Federated Learning, 2021, section 4 (partitioned and sampled models).
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.fields.federate.gossip.averaging import PlainAverage
from shoal.fields.federate.gossip.protocols import Tensors


@part
class Partitioned(PlainAverage):
    """The mean, of a random part of the tensors at a time; the rest stays as it is.

    Args:
        fraction: of the tensors that a message has, drawn for each message.
    """

    fraction: Annotated[float, Gt(0), Le(1)] = 0.5

    def sent(self, tensors: Tensors, draw: np.random.Generator) -> Tensors:
        """As many tensors, at least one."""
        names = list(tensors)
        count = max(1, math.ceil(self.fraction * len(names) - 1e-9))
        some = sorted(draw.permutation(len(names))[:count])
        return {names[at]: tensors[names[at]] for at in some}

    def message_bytes(self, size: int) -> float:
        """A part of the model in float32; tensors are taken for equally large."""
        return 4.0 * size * self.fraction
