"""What the kernels of ``recurrence`` have in common: checks, buffers, and what steps cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.errors import KernelError
from shoal.core.parts import load_object
from shoal.ir import Estimate, Interval, Machine
from shoal.kernel.base import BaseKernel
from shoal.kernel.protocols import Ready
from shoal.kernel.rnn.call import Recurrence
from shoal.kernel.rnn.functions import function

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecurrenceTrace:
    """What a forward pass leaves, in the type that it computed in.

    Args:
        h: output of every step [B, T, N, D].
        rest: the other states [S - 1, B, T, N, D].
        gates: what the backward pass wants of the gates [B, T, kept, N, D], or None.
    """

    h: Tensor
    rest: Tensor
    gates: Tensor | None = None

    def last(self) -> Tensor:
        """States after the last step [S, B, 1, N, D]."""
        import torch

        return torch.cat([self.h[None, :, -1:], self.rest[:, :, -1:]])


@dataclass(frozen=True, slots=True)
class RecurrenceGradients:
    """Gradients of wx [B, T, inputs, N, D], R, bias and the first states [S, B, 1, N, D]."""

    wx: Tensor
    R: Tensor
    bias: Tensor
    states: Tensor


class RecurrenceKernel(BaseKernel):
    """Base of the kernels of ``recurrence``.

    Attributes:
        step_s: overhead of a forward step in seconds, besides arithmetic.
        calls: module whose ``forward`` and ``backward`` compute all steps.
        traced: PyTorch differentiates what it does; otherwise it has a ``backward``.
    """

    op: ClassVar[str] = "recurrence"
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "bf16")
    rate: ClassVar[str | None] = None
    step_s: ClassVar[float] = 1e-4
    calls: ClassVar[str]
    traced: ClassVar[bool] = False

    def estimate(self, call: Any, machine: Machine) -> Estimate:
        """Time of one call: what :class:`BaseKernel` says, and every step's own."""
        estimate = super().estimate(call, machine)
        seconds = estimate.step_s.value + call.steps * self._step_s(call, machine)
        return estimate.model_copy(
            update={
                "step_s": Interval.around(seconds, 0.6),
                "terms_s": {**estimate.terms_s, "steps": seconds - estimate.step_s.value},
            }
        )

    def forward(
        self,
        call: Recurrence,
        wx: Tensor,
        R: Tensor,
        bias: Tensor,
        states: Tensor,
        *,
        keep: bool = False,
        out: Tensor | None = None,
    ) -> RecurrenceTrace:
        """All steps.

        Args:
            call: the shapes.
            wx: [B, T, inputs, N, D].
            R: [products, N, D, D].
            bias: [gates, N, D].
            states: before the first step [S, B, 1, N, D].
            keep: keep what ``backward`` wants of the gates.
            out: memory for the states [S, B, T, N, D], in the type computed in.
        """
        trace: RecurrenceTrace = load_object(f"{self.calls}:forward")(
            call, wx, R, bias, states, keep=keep, out=out
        )
        return trace

    def backward(
        self,
        call: Recurrence,
        wx: Tensor,
        R: Tensor,
        bias: Tensor,
        states: Tensor,
        trace: RecurrenceTrace,
        dh: Tensor | None,
        drest: Tensor | None,
        dlast: Tensor | None,
        clip: float,
    ) -> RecurrenceGradients:
        """Gradients, given those of the states and of the last states (None: zero).

        Args:
            call: the shapes.
            wx: as of the forward pass, as are the next three.
            R: [products, N, D, D].
            bias: [gates, N, D].
            states: before the first step.
            trace: what the forward pass left.
            dh: of all outputs [B, T, N, D].
            drest: of all other states [S - 1, B, T, N, D].
            dlast: of the last states [S, B, 1, N, D].
            clip: bound of what the product sends back to a state, at every step; 0: none.
        """
        recurrence_gradients: RecurrenceGradients = load_object(f"{self.calls}:backward")(
            call, wx, R, states, trace, dh, drest, dlast, clip
        )
        return recurrence_gradients

    def _step_s(self, call: Recurrence, machine: Machine) -> float:
        # Every step reads the matrices again, from the nearest level that holds them all.
        rates = [
            tier.read_bandwidth
            for tier in machine.device.memory
            if tier.capacity_bytes >= call.matrix_bytes and tier.read_bandwidth
        ]
        streamed = call.matrix_bytes / rates[0] if rates else 0.0
        return (self.step_s + streamed) * (3.0 if call.backward else 1.0)

    def _refuses(self, call: Any) -> str | None:
        function(call.function)
        return None

    def _prepare(self, call: Recurrence, R: Tensor, bias: Tensor | None = None) -> Ready:
        import torch

        from shoal.kernel.rnn.shapes import bias_of, check, states_of

        def run(wx: Tensor, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
            check(call.function, wx, R, bias, states)
            with torch.no_grad():
                every_bias = bias_of(call.function, R, bias)
                begin = states_of(call.function, wx, states)
                trace = self.forward(call, wx, R, every_bias, begin)
                all_states = torch.cat([trace.h[None], trace.rest])
                return all_states.to(wx.dtype), trace.last().to(wx.dtype)

        if R.dim() != 4 or R.shape[1:] != (call.heads, call.units, call.units):
            raise KernelError(
                f"rnn.R = {list(R.shape)}: expected [{function(call.function).products}, "
                f"{call.heads}, {call.units}, {call.units}]"
            )
        return run
