"""How fast the kernels are here, as the probe of this machine has them run: nothing is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["ROWS", "rehearse"]

ROWS = (1, 4, 16, 64)
"""Rows at which kernels of products are timed; between them their rates are interpolated."""

# Weights that are gone through in turn, so that none is found in a cache.
_ROTATED_BYTES = 512 * 2**20
_N = _K = 4096
_FORMAT = "int4-g128"
# Meanings, not ways to compute.
_SLOW = ("reference", "integer")


def rehearse(repeats: int, rotated_bytes: int = _ROTATED_BYTES) -> list[dict[str, Any]]:
    """Bytes a second that each kernel of a product moves, at several numbers of rows.

    Args:
        repeats: passes over all weights.
        rotated_bytes: of weights.

    Returns:
        ``{"name": OP.BACKEND, "dtype": of the rows, "at": rows, "rates": [B/s ...]}``; what this
        machine cannot run is left out.
    """
    import torch

    from shoal.kernel.calls import Linear, LinearLowbit
    from shoal.kernel.formats import weight_format
    from shoal.kernel.tensors import dtype_of

    form = weight_format(_FORMAT)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for dtype in ("bf16", "fp32"):
            weight = torch.randn(_N, _K).to(dtype_of(dtype))

            def dense(rows: int, dtype: Any = dtype) -> Linear:
                return Linear(rows, _N, _K, dtype)

            def packed(rows: int, dtype: Any = dtype) -> LinearLowbit:
                return LinearLowbit(rows, _N, _K, _FORMAT, form.bits, dtype)

            found += _rates(dense, weight, repeats, rotated_bytes)
            found += _rates(packed, form.quantize(weight.float()), repeats, rotated_bytes)
    return found


def _rates(
    call_of: Callable[[int], Any], constant: Any, repeats: int, rotated_bytes: int
) -> list[dict[str, Any]]:
    """All kernels of one operator with as many copies of one weight as exceed the caches."""
    import torch

    from shoal.core.errors import KernelError
    from shoal.kernel.dispatch import kernels_of
    from shoal.kernel.tensors import dtype_of

    found: list[dict[str, Any]] = []
    call = call_of(1)
    copies = max(2, int(rotated_bytes / (call.moved_bytes)))
    for backend, kernel in kernels_of(call.op).items():
        if backend in _SLOW or kernel.refuses(call):
            continue
        try:
            ready = [kernel.prepare(call, _copied(constant)) for _ in range(copies)]
        except KernelError:  # it cannot take these weights, which no call tells
            continue
        for rows in ROWS:
            x = torch.randn(rows, _K).to(dtype_of(call.dtype))
            ready[0](x)
            rates = []
            for _ in range(repeats):
                begin = time.perf_counter()
                for run in ready:
                    run(x)
                taken = time.perf_counter() - begin
                rates.append(call_of(rows).moved_bytes * copies / taken)
            name = f"{call.op}.{backend}"
            found.append({"name": name, "dtype": call.dtype, "at": rows, "rates": rates})
        del ready
    return found


def _copied(constant: Any) -> Any:
    """Memory of its own, for kernels that take weights as they are."""
    return constant.clone() if hasattr(constant, "clone") else constant
