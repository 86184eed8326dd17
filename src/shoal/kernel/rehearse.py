"""The probe of kernels: what Shoal's reach on this host, and the peers that they compete with.

From these numbers :mod:`shoal.kernel.dispatch` decides which kernel is fastest for a call.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from annotated_types import Ge

from shoal.core.errors import MachineError, MissingExtraError
from shoal.core.parts import part
from shoal.ir.machine import Measurement
from shoal.machine.protocols import ProbeContext

ROWS = (1, 4, 16, 64, 512)
"""Rows at which kernels of products are timed; between them their rates are interpolated."""

# From so many rows on multiplying takes so much longer than reading that one weight will do.
_MANY = 256

# Weights that are gone through in turn, so that few are found in a cache.
_ROTATED_BYTES = 256 * 2**20


@part
class KernelsProbe:
    """Byte/s of each kernel for several numbers of rows, with the weights in main memory.

    Args:
        repeats: passes over a quarter of a gibibyte of weights; 0 for 2 (fast) or 6.
    """

    repeats: Annotated[int, Ge(0)] = 0

    def run(self, context: ProbeContext) -> list[Measurement]:
        """Quantity ``OP.BACKEND`` (B/s) at a number of rows; the note is the type."""
        repeats = self.repeats or (2 if context.fast else 6)
        try:
            result = context.worker().call(
                "shoal.kernel.rehearse:rehearse", timeout_s=300.0, repeats=repeats
            )
        except (MissingExtraError, MachineError) as cause:
            context.skip("kernels", str(cause))
            return []
        return [
            context.measured(
                "kernels", one["name"], "B/s", one["rates"], at=one["at"], note=one["dtype"]
            )
            for one in result
        ]


def rehearse(repeats: int, rotated_bytes: int = _ROTATED_BYTES) -> list[dict[str, Any]]:
    """Bytes a second that each kernel of ``linear`` moves, at several numbers of rows.

    Returns:
        ``{"name": OP.BACKEND, "dtype": of the rows, "at": rows, "rates": [B/s ...]}``; what this
        machine cannot run is left out.
    """
    import torch

    from shoal.kernel.base import PROBED_EDGE
    from shoal.kernel.calls import Dtype, LinearCall
    from shoal.kernel.dispatch import kernels_of
    from shoal.kernel.tensors import dtype_of

    results: list[dict[str, Any]] = []
    dtypes: tuple[Dtype, ...] = ("bf16", "fp32")
    with torch.inference_mode():
        for dtype in dtypes:
            weight = torch.randn(PROBED_EDGE, PROBED_EDGE).to(dtype_of(dtype))
            copies = max(2, rotated_bytes // (weight.numel() * weight.element_size()))
            weights = [weight, *(weight.clone() for _ in range(copies - 1))]
            for backend, kernel in kernels_of("linear").items():
                call = LinearCall(1, PROBED_EDGE, PROBED_EDGE, dtype)
                if backend == "reference" or kernel.interpreted(call) or kernel.refuses(call):
                    continue
                ready = [kernel.prepare(call, one) for one in weights]
                for rows in ROWS:
                    x = torch.randn(rows, PROBED_EDGE).to(dtype_of(dtype))
                    taken = ready[:1] if rows >= _MANY else ready
                    moved = LinearCall(rows, PROBED_EDGE, PROBED_EDGE, dtype).moved_bytes * len(
                        taken
                    )
                    ready[0](x)
                    rates = []
                    for _ in range(repeats):
                        begin = time.perf_counter()
                        for run in taken:
                            run(x)
                        rates.append(moved / (time.perf_counter() - begin))
                    name = f"linear.{backend}"
                    results.append({"name": name, "dtype": dtype, "at": rows, "rates": rates})
    return results
