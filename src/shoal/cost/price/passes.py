"""Seconds of one group of operators, forward and backward, by the rates of a machine.

Source: Williams et al., Roofline, 2009.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shoal.cost.gpu.kernels import GAP_S
from shoal.cost.price.ops import OpGroup
from shoal.cost.price.rates import REPACKED, Curve, KernelRates

# On a CPU an operator of a step finds its operands displaced from the caches and writes to
# memory fresh from the allocator; the probe repeats one operator on the same arrays. The
# same operators take this much longer in a step than repeated (PyTorch 2.13, three models).
DISPLACED = 1.75


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch on one rank, one direction.

    Args:
        matmul: in matrix products.
        attention: in attention.
        memory: in operators that stream.
        calls: operators launched.
    """

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    calls: float = 0.0

    @property
    def device(self) -> float:
        """Seconds that the device computes."""
        return self.matmul + self.attention + self.memory

    def shared(self, ranks: int) -> PassSeconds:
        """The same with its tokens shared by so many ranks; every rank makes every call."""
        return PassSeconds(
            self.matmul / ranks, self.attention / ranks, self.memory / ranks, self.calls
        )

    def times(self, factor: float) -> PassSeconds:
        """The same, so much longer, with as many calls."""
        return PassSeconds(
            self.matmul * factor, self.attention * factor, self.memory * factor, self.calls
        )

    def scaled(self, factor: float) -> PassSeconds:
        """So much of it, calls included."""
        return PassSeconds(*(factor * each for each in self))

    def __add__(self, other: PassSeconds) -> PassSeconds:  # type: ignore[override]
        """Both, one after the other."""
        return PassSeconds(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.memory + other.memory,
            self.calls + other.calls,
        )


def op_pass(
    op: OpGroup, backward: bool, matmul: Curve, stream: Curve, precision: str, cpu: bool
) -> PassSeconds:
    """Seconds of one group of operators in one direction.

    Args:
        op: the entry.
        backward: the backward pass.
        matmul: FLOP/s over the edge of a product.
        stream: byte/s over the bytes of an operator.
        precision: fp32 or bf16.
        cpu: it runs on a CPU.
    """
    calls = op.count * (op.backward_calls if backward else op.forward_calls)
    traffic = op.backward_bytes if backward else op.forward_bytes
    displaced = DISPLACED if cpu else 1.0
    if op.kind == "memory":
        seconds = op.count * displaced * traffic / stream(max(1.0, op.size_bytes))
        gaps = 0.0 if cpu else op.gaps * calls
        return PassSeconds(memory=seconds + GAP_S * gaps, calls=calls)
    if op.kind == "attention":
        if isinstance(matmul, KernelRates):
            seconds = matmul.attention_s(op, backward=backward)
        else:
            flops = op.backward_flops if backward else op.forward_flops
            seconds = flops / matmul(256.0) + traffic / stream(op.size_bytes)
        return PassSeconds(attention=op.count * seconds, calls=calls)
    if isinstance(matmul, KernelRates):
        return PassSeconds(matmul=op.count * matmul.product_s(op, backward=backward), calls=calls)
    width = 2.0 if precision == "bf16" else 4.0
    flops = 2.0 * op.M * op.N * op.K
    touched = width * (op.M * op.K + op.N * op.K + op.M * op.N)
    traffic = displaced * touched / stream(max(1.0, touched))
    # A skinny product reuses its operands as little as a small cube does.
    edge = math.sqrt(min(op.M, op.N, op.K) * (op.M * op.N * op.K) ** (1 / 3))
    once = flops / matmul(edge) + traffic
    repacked = REPACKED.get(precision, 1.0)
    weight = flops / (repacked * matmul(edge)) + traffic
    if not backward:
        return PassSeconds(matmul=op.count * once, calls=calls)
    # The gradients of the input and of the weight; the latter multiplies a transpose.
    return PassSeconds(matmul=op.count * op.backward_share * (once + weight), calls=calls)
