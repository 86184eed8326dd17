"""What is asked of ``recurrence``: shapes and types, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.kernel.calls import BYTES, Device, Dtype
from shoal.kernel.rnn.functions import function


@dataclass(frozen=True, slots=True)
class Recurrence:
    """T steps of a recurrence over N heads of D units.

    Constants: ``R[products, N, D, D]`` (outputs, inputs) and ``bias[gates, N, D]``.
    ``ready(wx[B, T, inputs, N, D], states[S, B, 1, N, D] or None) -> (states[S, B, T, N, D],
    last[S, B, 1, N, D])``; B and T may differ between calls.

    Args:
        function: lstm, gru, elman or slstm.
        batch: sequences.
        steps: of each.
        heads: recurrent matrices.
        units: of a head.
        dtype: of everything; bf16 is computed in fp32 and rounded at the end.
        backward: whether the gradients are wanted too.
    """

    op: ClassVar[str] = "recurrence"
    function: str
    batch: int
    steps: int
    heads: int
    units: int
    dtype: Dtype = "fp32"
    device: Device = "cpu"
    backward: bool = False

    @property
    def matrix_bytes(self) -> float:
        """Bytes of the recurrent matrices."""
        products = function(self.function).products
        return float(BYTES[self.dtype] * products * self.heads * self.units**2)

    @property
    def rows(self) -> int:
        """Steps of all sequences."""
        return self.batch * self.steps

    @property
    def flops(self) -> float:
        """The recurrent products, forward, and twice as much backward."""
        once = 2.0 * self.rows * function(self.function).products * self.heads * self.units**2
        return once * (3 if self.backward else 1)

    @property
    def moved_bytes(self) -> float:
        """Matrices, inputs and states once; backward also gates and all gradients."""
        what = function(self.function)
        numbers = len(what.inputs) + len(what.states)
        if self.backward:
            numbers += 2 * what.kept + 2 * len(what.inputs) + len(what.states) + 1
        each = float(BYTES[self.dtype] * self.rows * self.heads * self.units)
        return self.matrix_bytes * (3 if self.backward else 1) + each * numbers
