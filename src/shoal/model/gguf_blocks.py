"""What the bytes of GGUF's tensor types mean, in fp32.

A block is a run of elements of one row with scales of its own:

- Q4_0: 32 elements; fp16 d, 16 bytes; ``(q - 8) d``, low nibbles first, then high ones.
- Q8_0: 32 elements; fp16 d, 32 signed bytes; ``q d``.
- Q4_K: 256 elements in 8 groups; fp16 d and m, 8 scales and 8 minima of 6 bits in 12 bytes,
  128 bytes; ``d s q - m t``. Of every 64 elements the first 32 are low nibbles.
- Q6_K: 256 elements in 16 groups; 128 bytes of lower 4 bits, 64 of upper 2, 16 signed scales,
  fp16 d; ``d s (q - 32)``.

Shapes: n blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def _half(raw_n2: np.ndarray) -> np.ndarray:
    """fp16 from two bytes each, as fp32 [n, 1]."""
    return np.ascontiguousarray(raw_n2).view("<f2").astype(np.float32)


def _q4_0(raw: np.ndarray) -> np.ndarray:
    codes = raw[:, 2:]
    both = np.concatenate([codes & 15, codes >> 4], 1).astype(np.float32)
    return np.asarray((both - 8) * _half(raw[:, :2]))


def _q8_0(raw: np.ndarray) -> np.ndarray:
    codes = np.ascontiguousarray(raw[:, 2:]).view(np.int8).astype(np.float32)
    return np.asarray(codes * _half(raw[:, :2]))


def _q4_k(raw: np.ndarray) -> np.ndarray:
    d, least = _half(raw[:, :2]), _half(raw[:, 2:4])
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    # Of the last four groups, the upper two bits stand in what the first four leave free.
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], 1).astype(np.float32)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], 1).astype(np.float32)
    pairs = raw[:, 16:].reshape(-1, 4, 32)
    codes = np.stack([pairs & 15, pairs >> 4], 2).reshape(-1, 8, 32).astype(np.float32)
    out = (d * scales)[..., None] * codes - (least * minima)[..., None]
    return np.asarray(out.reshape(-1, 256))


def _q6_k(raw: np.ndarray) -> np.ndarray:
    low = raw[:, :128].reshape(-1, 2, 1, 2, 32)
    high = raw[:, 128:192].reshape(-1, 2, 1, 1, 32)
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)
    # Of each half, four runs of 32: low nibbles of two, then high nibbles of the same bytes.
    nibbles = np.concatenate([low & 15, low >> 4], 2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    upper = (high.reshape(-1, 2, 1, 32) >> shifts) & 3
    codes = (nibbles | upper << 4).astype(np.float32) - 32
    groups = codes.reshape(-1, 16, 16) * (_half(raw[:, 208:]) * scales)[..., None]
    return np.asarray(groups.reshape(-1, 256))


_DECODERS: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "Q4_0": (18, _q4_0),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
}


def decode(kind: str, raw: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """The elements of a tensor, fp32."""
    if kind in _DECODERS:
        size, function = _DECODERS[kind]
        values = function(raw.reshape(-1, size))
    elif kind == "BF16":
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = raw.view("<f2" if kind == "F16" else "<f4").astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(shape)
