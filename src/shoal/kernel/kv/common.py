"""What the formats of the cache share: how it gets there, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.core.errors import KernelError
from shoal.core.native import compiler

# store [S, K, n], slots [N], rows [N, K, n]
Put = Callable[[Tensor, Tensor, Tensor], None]


def fast(x: Tensor) -> bool:
    """Whether the compiled code takes it."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and compiler() is not None
    )


def not_finite(x_NKd: Tensor) -> KernelError:
    """The error that names the first number that no code means."""
    place = [int(i) for i in (~torch.isfinite(x_NKd)).nonzero()[0]]
    return KernelError(
        f"cache: number {x_NKd[tuple(place)].item()} of (token, head, channel) {place}: expected "
        "finite keys and values; check the model's weights, or use format plain"
    )


def powers_of_two(exponent: Tensor) -> Tensor:
    """2^e in fp64, exactly, for -1022 <= e <= 1023."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def side_by_side(x: Tensor) -> tuple[Tensor, int, int]:
    """Rows [..., K, d] with K of them side by side; K, and numbers to the next K."""
    *_, heads, d = x.shape
    if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == d:
        return x, heads, x.stride(0)
    return x.contiguous(), heads, heads * d


def _copied(store_SKn: Tensor, slots_N: Tensor, rows_NKn: Tensor) -> None:
    store_SKn.index_copy_(0, slots_N, rows_NKn)


def writer(device: torch.device) -> Put:
    """What puts rows in their slots, which are contiguous.

    Raises, when it is called:
        KernelError: a slot is not one of the store's (an IndexError without a compiler).
    """
    if device.type != "cpu" or compiler() is None:
        return _copied
    from shoal.kernel.native import function

    run = function("kv", "kv_put", "pppllll", "l")

    def put(store_SKn: Tensor, slots_N: Tensor, rows_NKn: Tensor) -> None:
        rows, heads, stride = side_by_side(rows_NKn)
        size = rows.element_size()
        bad = run(
            store_SKn.data_ptr(), slots_N.data_ptr(), rows.data_ptr(), len(rows),
            heads * rows.shape[2] * size, stride * size, len(store_SKn),
        )  # fmt: skip
        if bad >= 0:
            raise KernelError(
                f"cache: slot {int(slots_N[bad])} of token {bad}: expected 0 to "
                f"{len(store_SKn) - 1}, the slots of the cache"
            )

    return put
