"""4-bit weights as the CPU kernels want them, and what those that round activations compute.

Source: Frantar et al., MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large
Language Models, 2024.

Weights are repacked once (:func:`blocks`) so that a product reads them from the first byte to
the last: slices of 32 outputs, in them segments of K, in them codes and then scales;
native/lowbit.h says how. A *segment* is a group or a part of one, at most 256 weights.

Shapes: M rows, N outputs, K inputs, S segments of a row, s weights of a segment.
"""

from __future__ import annotations

import ctypes
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shoal.kernel.formats import weight_format
from shoal.kernel.formats.normal import CODEBOOK, Nf
from shoal.kernel.lowbit.marlin_cpu import library, segment_of
from shoal.kernel.protocols import PackedMatrix

_WIDE = 32
# Inputs that are summed before sums are added: what one thread does at least.
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Blocks:
    """Repacked weights.

    Args:
        memory: uint8 [slices, S, bytes], contiguous.
        shape: (N, K).
        segment: weights of a segment.
        sparse: two of four are kept.
        values: what codes mean in bf16, twice: 64 bytes, from the first of a line of the cache.
    """

    memory: Tensor
    shape: tuple[int, int]
    segment: int
    sparse: bool
    values: Tensor

    def header(self, bias: Tensor | None) -> ctypes.Array[ctypes.c_int64]:
        """What the native functions receive: struct Blocks of native/lowbit.h."""
        slices, segments, record = self.memory.shape
        chunk = max(1, _CHUNK // self.segment)
        values = (
            self.memory.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            *self.shape,
            self.segment,
            segments,
            chunk,
            -(-segments // chunk),
            slices,
            record,
            int(self.sparse),
            self.values.data_ptr(),
        )
        return (ctypes.c_int64 * len(values))(*values)


# Both kernels of a layer read the same memory. Tensor -> its version then, and the blocks.
_MADE: MutableMapping[Tensor, tuple[int, Blocks]] = WeakIdKeyDictionary()


def blocks(weight: PackedMatrix) -> Blocks:
    """A matrix of ``int4`` or ``nf4``, repacked; the same object while its codes live unchanged.

    Raises:
        KernelError: its groups cannot be cut in segments.
    """
    codes = weight.tensors["codes"]
    if codes.is_inference():  # their changes are not counted
        return _repacked(weight)
    value = _MADE.get(codes)
    if value is not None and value[0] == codes._version:
        return value[1]
    made = _repacked(weight)
    _MADE[codes] = (codes._version, made)
    return made


def _repacked(weight: PackedMatrix) -> Blocks:
    from shoal.kernel.native import function

    stored = weight_format(weight.format)
    n, k = weight.shape
    group = stored.group_of(k)
    s = segment_of(k, group)
    segments, slices = -(-k // s), -(-n // _WIDE)
    code_bytes = s * _WIDE * (3 if stored.keeps_half else 4) // 8
    memory = _roomy(slices, segments, code_bytes + 2 * _WIDE)
    function(library(), "large_pages", "pl")(memory.data_ptr(), memory.numel())

    def rows(tensor: Tensor, columns: int) -> Tensor:
        """[N, bytes] filled up with zeros, as [slices, 2, 16, columns]."""
        more = (0, columns - tensor.shape[1], 0, slices * _WIDE - n)
        return F.pad(tensor, more).view(slices, 2, 16, columns)

    codes = rows(weight.tensors["codes"], segments * s // (4 if stored.keeps_half else 2))
    if stored.keeps_half:
        # 16 inputs: 4 bytes of kept codes, of four fours; fours 0 and 2 go to the lower half.
        kept = codes.unflatten(-1, (segments, s // 16, 4))[..., [0, 2, 1, 3]] ^ 0x88  # type: ignore[no-untyped-call]
        places = rows(weight.tensors["places"], segments * s // 8)
        fours = places.unflatten(-1, (segments, s // 16, 2))  # type: ignore[no-untyped-call]
        even = (fours[..., 0] & 15) | (fours[..., 1] & 15) << 4
        odd = (fours[..., 0] >> 4) | (fours[..., 1] & 0xF0)
        stood = torch.stack((even, odd), -1)
        # [slices, 2, 16, S, s / 16, bytes] -> [slices, S, s / 16, 2 * 16 * bytes]
        parts = [t.permute(0, 3, 4, 1, 2, 5).flatten(3) for t in (kept, stood)]
        lines = torch.cat(parts, -1)
    else:
        lines = codes.unflatten(-1, (segments, s // 8, 4)).permute(0, 3, 4, 1, 2, 5)  # type: ignore[no-untyped-call]
    memory[..., :code_bytes] = lines.reshape(slices, segments, code_bytes)
    each = weight.tensors["scales"].repeat_interleave(-(-group // s), 1)
    scales = F.pad(each, (0, 0, 0, slices * _WIDE - n)).view(slices, _WIDE, segments)
    # Scales are two bytes each, behind the codes.
    memory[..., code_bytes:] = scales.transpose(1, 2).contiguous().view(torch.uint8)
    return Blocks(memory, (n, k), s, stored.keeps_half, _values(stored))


def _values(stored: object) -> Tensor:
    """What the 16 codes of a format mean in bf16, twice."""
    meant = CODEBOOK if isinstance(stored, Nf) else range(-8, 8)
    room = _roomy(64)
    room.copy_(torch.tensor([*meant, *meant], dtype=torch.bfloat16).view(torch.uint8))
    return room


def _roomy(*shape: int) -> Tensor:
    """Memory that begins with a line of the cache."""
    size = 1
    for dim in shape:
        size *= dim
    room = torch.empty(size + 64, dtype=torch.uint8)
    first = -room.data_ptr() % 64
    return room[first : first + size].view(shape)


def quantize_rows(x_MK: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    """Rows as int8 codes [M, S, s] and scales [M, S]: nearest even, the largest is 127.

    K is filled up with zeros to a multiple of the segment.
    """
    x_MSs = F.pad(x_MK.float(), (0, -x_MK.shape[-1] % segment)).unflatten(-1, (-1, segment))  # type: ignore[no-untyped-call]
    largest = x_MSs.abs().amax(-1)
    some = largest > 1e-30
    # A number over a tensor would be its reciprocal times the number, rounded twice.
    inverse = torch.where(some, torch.full_like(largest, 127.0) / largest, 0.0)
    codes = (x_MSs * inverse[..., None]).round().clamp(-128, 127).to(torch.int8)
    return codes, torch.where(some, largest / 127.0, 0.0)


def product_w4a8(x_MK: Tensor, weight: PackedMatrix, bias_N: Tensor | None = None) -> Tensor:
    """What ``linear_lowbit.cpp_w4a8`` computes: rows rounded to int8, sums of integers exact.

    Args:
        x_MK: fp32 or bf16.
        weight: of format int4.
        bias_N: added in fp32.
    """
    stored = weight_format(weight.format)
    k = weight.shape[1]
    group = stored.group_of(k)
    s = segment_of(k, group)
    codes, scale = quantize_rows(x_MK, s)
    ones = {name: torch.ones_like(t) for name, t in stored.grid_of(weight).items()}
    exact = stored.dequantize(PackedMatrix(weight.format, weight.shape, {**weight.tensors, **ones}))
    w_NSs = F.pad(exact, (0, -k % s)).unflatten(-1, (-1, s)).double()  # type: ignore[no-untyped-call]
    sums = torch.einsum("mgs,ngs->mng", codes.double(), w_NSs).float() * scale[:, None, :]
    by = weight.tensors["scales"].double().repeat_interleave(-(-group // s), 1)
    out = (sums.double() * by).sum(-1).float()
    return (out if bias_N is None else out + bias_N.float()).to(x_MK.dtype)
