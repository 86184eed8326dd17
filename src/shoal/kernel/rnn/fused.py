"""The whole sequence in one call: the recurrent matrix stays next to the arithmetic.

Source: Pöppel et al., FlashRNN: Optimizing Traditional RNNs on Modern Hardware, 2024 (the fused
kernel).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.parts import part
from shoal.ir import Machine
from shoal.kernel.rnn.base import RecurrenceKernel
from shoal.kernel.rnn.call import Recurrence
from shoal.plan.constrint.solve import UnsatisfiableError
from shoal.plan.constrint.tiles import RecurrenceShape, Tiling, facts_of, here, tiling

if TYPE_CHECKING:
    from shoal.plan.constrint.tiles import Facts


@part
class FusedRecurrence(RecurrenceKernel):
    """C++ over all steps: product and cell function in registers, R packed in the L2 cache.

    Each thread computes its own heads and slices of the batch without synchronization; if a head is
    too large for one core, or cores are left over, several threads share it with one barrier per
    step. A solver chooses the tiles (``shoal explain tiles recurrence``). Matrices that do not fit
    in the caches of all threads are refused.
    """

    backend: ClassVar[str] = "fused"
    invariant: ClassVar[bool] = True
    compiled: ClassVar[bool] = True
    memory_share: ClassVar[float] = 0.4
    compute_share: ClassVar[float] = 0.25
    step_s: ClassVar[float] = 5e-7
    calls: ClassVar[str] = "shoal.kernel.rnn.native_calls"

    def _refuses(self, call: Any) -> str | None:
        reason = super()._refuses(call)
        if reason is not None:
            return reason
        try:
            tiles_of(call)
        except UnsatisfiableError as cause:
            return (
                f"keeps the recurrent matrix of a head of {call.units} units in the L2 of the "
                f"cores that compute it, and it does not fit ({'; '.join(cause.conflict)}); use "
                "alternating, more heads, or bf16"
            )
        return None

    def _step_s(self, call: Recurrence, machine: Machine) -> float:
        facts = facts_of(machine)
        # 48 bytes a cycle from L2, at 2.5 GHz, by as many cores as have a head or a row.
        busy = min(facts.cores, max(1, call.heads * call.batch))
        streamed = call.matrix_bytes / (48 * 2.5e9 * busy)
        return (self.step_s + streamed) * (3.0 if call.backward else 1.0)


def tiles_of(call: Recurrence, facts: Facts | None = None) -> Tiling:
    """How the work of a call is cut.

    Raises:
        UnsatisfiableError: the recurrent matrix of a head fits into no team's caches.
    """
    if facts is None:
        facts = here()
        torch = sys.modules.get("torch")
        if torch is not None:
            facts = facts.model_copy(update={"cores": torch.get_num_threads()})
    shape = RecurrenceShape(
        hidden=call.heads * call.units,
        heads=call.heads,
        # Beyond, only more of the same.
        batch=min(call.batch, 64),
        function=call.function,
        lanes=8 if call.dtype == "fp64" else 16,
        number_bytes={"fp64": 8, "fp32": 4, "bf16": 2}[call.dtype],
    )
    return tiling(shape, facts)
