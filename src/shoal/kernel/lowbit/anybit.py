"""Products with weights of any type of 1 to 8 bits, by one program of the tile machine.

The program (:func:`shoal.kernel.tile.programs.lowbit_matmul`) is compiled for a type and a number
of rows once, in a second or two, and kept with the other native code. Weights are stored a
second time as its tiles want them, as many bits as before.

Source: Ding et al., Tilus: A Tile-Level GPGPU Programming Language for Low-Precision
Computation, 2025.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.parts import part
from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.formats.affine import Uint
from shoal.kernel.formats.floating import Float
from shoal.kernel.formats.integer import Int
from shoal.kernel.lowbit.base import LowbitKernel, checked, require_rows
from shoal.kernel.pages import room
from shoal.kernel.protocols import PackedMatrix, Ready
from shoal.kernel.tile.host import Unpack, build_host
from shoal.kernel.tile.programs import lowbit_matmul, lowbit_pack

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.formats.base import BaseFormat

COLUMNS = 32
"""Outputs of a tile: four vectors of eight, which share the activations that are loaded."""

_STEPS = (128, 64, 32, 16)

ROWS = (4, 2, 1)
"""Rows that one function multiplies; more are taken in pieces."""


@dataclass(frozen=True, slots=True)
class _Type:
    """What a weight format is to the program.

    Args:
        weight: type of the codes.
        flip: bits that are turned over in every code: excess codes are two's complement with
            their upper bit turned over.
        zeros: there are zero points.
    """

    weight: str
    flip: int = 0
    zeros: bool = False


def type_of(format_: Any) -> _Type | None:
    """The type of the codes of a weight format; None if it is none of the machine's."""
    if isinstance(format_, Int) and not format_.half:
        return _Type(f"int{format_.width}", 1 << (format_.width - 1))
    if isinstance(format_, Uint):
        return _Type(f"uint{format_.width}", zeros=True)
    if isinstance(format_, Float) and format_.code_bits >= 3:
        return _Type(f"float{format_.code_bits}_e{format_.exponent}m{format_.mantissa}")
    return None


def step_of(k: int, group: int) -> int:
    """Weights along K of a tile: the most that fill a group.

    Args:
        k: of a row.
        group: that share a scale; a row of one group is filled up with zeros, to 16.
    """
    whole = [step for step in _STEPS if group % step == 0]
    return whole[0] if whole else 16 if group == k else 8


@functools.cache
def compiled(
    weight: str, step: int, out: str, zeros: bool, unpack: Unpack = "recipe"
) -> dict[str, Callable[..., Any]]:
    """The functions for a type: ``lowbit_pack``, and ``rows1``, ``rows2`` ... of the product.

    Args:
        weight: type of the codes.
        step: weights along K of a tile.
        out: type of the results.
        zeros: with zero points.
        unpack: ``generic`` for the same program with an extraction bit by bit.
    """
    programs = [lowbit_pack.trace(weight=weight, step=step, columns=COLUMNS)]
    programs += [
        lowbit_matmul.trace(
            name=f"rows{rows}",
            weight=weight,
            rows=rows,
            step=step,
            columns=COLUMNS,
            out=out,
            zeros=zeros,
        )
        for rows in ROWS
    ]
    return build_host(programs, name=f"{weight}-{out}", unpack=unpack)


@part
class Anybit(LowbitKernel):
    """AVX-512 for all widths: permutes bytes to lanes, extracts codes and looks up their values.

    Supports ``int1`` to ``int8``, ``uint1`` to ``uint8`` and every ``float`` of 3 to 8 bits, with
    groups of a multiple of 8 or one scale per output. Products use bf16 weights, which represent
    every such code exactly, and fp32 sums; fp32 rows are split into three bf16 rows. The order of
    summation does not depend on the number of rows.
    """

    backend: ClassVar[str] = "anybit"
    invariant: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16")
    needs: ClassVar[frozenset[str]] = frozenset(
        {
            "avx512f",
            "avx512bw",
            "avx512dq",
            "avx512vl",
            "avx512_bf16",
            "avx512vbmi",
            "avx512_vbmi2",
            "f16c",
        }
    )
    compiled: ClassVar[bool] = True
    memory_share: ClassVar[float] = 0.6
    compute_share: ClassVar[float] = 0.2
    call_s: ClassVar[float] = 1e-5

    def _refuses_format(self, call: LowbitLinearCall, stored: BaseFormat, group: int) -> str | None:
        if type_of(stored) is None:
            return (
                f"has no type for {call.format}; expected int1 to int8, uint1 to uint8 or a float "
                "of 3 to 8 bits, without sparsity"
            )
        if group % 8 and group != call.k:
            return f"needs groups of a multiple of 8; nearest to {group} is {-(-group // 8) * 8}"
        return None

    def _prepare(
        self, call: LowbitLinearCall, weight: PackedMatrix, bias_N: Tensor | None = None
    ) -> Ready:
        return prepare(call, weight, bias_N)


def prepare(
    call: LowbitLinearCall,
    weight: PackedMatrix,
    bias_N: Tensor | None = None,
    unpack: Unpack = "recipe",
) -> Ready:
    """The product with these weights; ``unpack`` as of :func:`compiled`.

    Raises:
        KernelError: the weights or the bias are not what the call says.
    """
    import torch
    import torch.nn.functional as F

    from shoal.kernel.formats.bits import pack
    from shoal.kernel.tensors import constant, finite

    n, k = call.n, call.k
    chosen = checked(call, weight)
    kind = type_of(chosen)
    assert kind is not None, "refused"
    group = chosen.group_of(k)
    step = step_of(k, group)
    steps = -(-group // step)
    groups = k // group
    tiles_n = -(-n // COLUMNS)
    dtype = torch.bfloat16 if call.dtype == "bf16" else torch.float32
    functions = compiled(kind.weight, step, call.dtype, kind.zeros, unpack)

    codes = weight.tensors["codes"].contiguous()
    if kind.flip:
        every = torch.full((k,), kind.flip, dtype=torch.uint8)
        codes = codes ^ pack(every, chosen.code_bits)
    row_bytes = codes.shape[1]
    size = step * COLUMNS * chosen.code_bits // 8
    tiles = room(tiles_n * groups * steps * size)
    functions["lowbit_pack"](
        codes.data_ptr(), tiles.data_ptr(), n, k, row_bytes * 8, groups * steps
    )

    def by_tile(tensor: Tensor) -> Tensor:
        """[N, G] -> [tile, G, columns]."""
        wide = F.pad(tensor, (0, 0, 0, tiles_n * COLUMNS - n))
        return wide.view(tiles_n, COLUMNS, -1).transpose(1, 2).contiguous()

    scales = by_tile(weight.tensors["scales"])
    bias, own_bias = torch.zeros(tiles_n * COLUMNS), None
    if bias_N is not None:
        own_bias = finite("bias", constant("bias", bias_N.float(), (n,), torch.float32))
        if dtype == torch.bfloat16:
            bias[:n] = own_bias
    zeros = by_tile(weight.tensors["zeros"]) if kind.zeros else None
    # A row of one group that is no multiple of a tile is read to the tile's end.
    length = groups * steps * step
    fixed = (tiles.data_ptr(), scales.data_ptr(), bias.data_ptr())
    zero_at = zeros.data_ptr() if zeros is not None else 0
    by_rows = [(rows, functions[f"rows{rows}"]) for rows in ROWS]

    def run(x: Tensor, out: Tensor, sums: Tensor | None) -> None:
        done, m = 0, x.shape[0]
        x_at, y_at, y_row = x.data_ptr(), out.data_ptr(), n * out.element_size()
        for rows, function in by_rows:
            count = (m - done) // rows * rows
            if not count:
                continue
            given: tuple[int, ...] = (x_at + done * length * 2, *fixed, y_at + done * y_row)
            if sums is not None:
                given += (zero_at, sums.data_ptr() + done * groups * 4)
            function(*given, count, n, length, groups, steps)
            done += count

    def group_sums(rows: Tensor) -> Tensor:
        # In two steps: PyTorch cuts one very long sum over threads, if it is the only one.
        return rows.float().view(-1, groups, length // groups // 8, 8).sum(-1).sum(-1)

    def product(x: Tensor) -> Tensor:
        require_rows(call, x, dtype)
        rows = x.reshape(-1, k)
        if not rows.is_contiguous():
            rows = rows.contiguous()
        if length != k:
            rows = F.pad(rows, (0, length - k))
        sums = group_sums(rows) if kind.zeros else None
        if dtype == torch.bfloat16:
            out = rows.new_empty(rows.shape[0], n)
            run(rows, out, sums)
            return out.view(*x.shape[:-1], n)
        # fp32 is the sum of three bf16, exactly: 24 bits in three times 8.
        high = rows.bfloat16()
        rest = rows - high.float()
        middle = rest.bfloat16()
        low = (rest - middle.float()).bfloat16()
        parts = torch.stack((low, middle, high))
        every = rows.new_empty(3, rows.shape[0], n)
        if sums is not None:
            sums = group_sums(parts)
        run(parts.view(-1, length), every.view(-1, n), sums)
        out = every[0] + every[1] + every[2]
        return (out if own_bias is None else out + own_bias).view(*x.shape[:-1], n)

    # The memory that the addresses are of lives as long as the function.
    product.constants = (tiles, scales, bias, zeros)  # type: ignore[attr-defined]
    return product
