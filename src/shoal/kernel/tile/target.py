"""Machines that a program is written for: their threads, and how their products want operands.

On the host a block has one warp of 8 threads, the 64-bit lanes of an AVX-512 register: eight
codes of N bits are N bytes, one lane, for every N. Its product takes, of each thread, 8 weights
of one output in the order 0, 4, 1, 5, 2, 6, 3, 7, so that the even and the odd bytes of a lane
meet four activations each as they lie in memory. On a GPU it is the tensor core's m16n8k16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from shoal.core.errors import KernelError
from shoal.kernel.tile.layout import (
    TileLayout,
    column_local,
    column_spatial,
    local,
    replicate,
    spatial,
)


@dataclass(frozen=True, slots=True)
class Target:
    """A machine.

    Args:
        name: host or cuda.
        warp: threads that compute a product together.
        atom: (m, n, k) of one product instruction.
        shared_bytes: of a block.
        a: (m, k, warps) -> layout of the left operand.
        b: (k, n, warps) -> layout of the right operand.
        c: (m, n, warps) -> layout of the result.
        run: (bits of an element, bytes of a thread) -> bytes that a thread has in a row.
    """

    name: str
    warp: int
    atom: tuple[int, int, int]
    shared_bytes: int
    a: Callable[[int, int, int], TileLayout]
    b: Callable[[int, int, int], TileLayout]
    c: Callable[[int, int, int], TileLayout]
    run: Callable[[int, int], int]

    def check(self, m: int, n: int, k: int, warps: int) -> None:
        """Hold the shape of a product against the instruction.

        Raises:
            KernelError: it does not divide; names the nearest that does.
        """
        need = (self.atom[0], self.atom[1] * warps, self.atom[2])
        if any(size % unit for size, unit in zip((m, n, k), need, strict=True)):
            near = [max(1, round(s / u)) * u for s, u in zip((m, n, k), need, strict=True)]
            raise KernelError(
                f"tile: Dot of m, n, k = {m}, {n}, {k} with {warps} warps on {self.name}: expected "
                f"multiples of {need[0]}, {need[1]}, {need[2]}; nearest {near}"
            )


# Four activations x0..x3 meet the even bytes, x4..x7 the odd ones: place 2b + a holds k = 4a + b.
_EIGHT = TileLayout((8, 1), (2, 4), (), (1, 0))

HOST = Target(
    name="host",
    warp=8,
    atom=(1, 8, 8),
    shared_bytes=1 << 20,
    a=lambda m, k, w: local(m, k) * replicate(8 * w, 2),
    b=lambda k, n, w: local(k // 8, n // (8 * w)) * spatial(1, 8 * w) * _EIGHT,
    c=lambda m, n, w: local(m, n // (8 * w)) * spatial(1, 8 * w),
    run=lambda bits, count: 8 if count % 8 == 0 else bits if count % bits == 0 else 1,
)

CUDA = Target(
    name="cuda",
    warp=32,
    atom=(16, 8, 16),
    shared_bytes=96 * 1024,
    a=lambda m, k, w: (
        local(m // 16, k // 16) * replicate(w, 2) * column_local(2, 2) * spatial(8, 4) * local(1, 2)
    ),
    b=lambda k, n, w: (
        local(k // 16, n // (8 * w))
        * spatial(1, w)
        * local(2, 1)
        * column_spatial(4, 8)
        * local(2, 1)
    ),
    c=lambda m, n, w: (
        local(m // 16, n // (8 * w)) * spatial(1, w) * local(2, 1) * spatial(8, 4) * local(1, 2)
    ),
    run=lambda bits, count: math.gcd(count, 16),
)

TARGETS = {target.name: target for target in (HOST, CUDA)}


def target_named(name: str) -> Target:
    """The target of a name.

    Raises:
        KernelError: there is none.
    """
    if name not in TARGETS:
        raise KernelError(f"tile: target {name!r}: expected one of {', '.join(TARGETS)}")
    return TARGETS[name]
