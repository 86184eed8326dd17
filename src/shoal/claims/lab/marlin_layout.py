"""The layout of 4-bit weights that the published GPU kernel reads, as data.

Source: Frantar et al., MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large
Language Models, 2024, section 3.

Weights are a matrix [K, N] of codes, cut in tiles of 16 x 16; four neighbours along N are a
run of 1024 codes, 256 a tile, in which code (k, n) of a tile has the place 16 k + n. Thread t
of 32 owns in each tile what the second operand of ``mma.m16n8k16`` wants of it: columns
t / 4 and t / 4 + 8, of each the rows 2 (t mod 4), + 1, + 8 and + 9. So one load of 16 bytes
brings it the 32 codes of its run. Codes of a word are interleaved so that a mask and a shift
take two at a time.

Scales [K / group, N] are permuted to match, 64 columns at a time; of whole columns, 32.

A buffer that is packed here has the bytes of the published checkpoints: int32
[K / 16, 2 N] and fp16 [K / group, N].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shoal.core.errors import KernelError

_Codes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.int32]
_Half = npt.NDArray[np.float16]

TILE = 16
_RUN = 4 * TILE * TILE
# Place in a word of eight codes, of the eight codes in the order of their owner.
_INTERLEAVED = np.array((0, 2, 4, 6, 1, 3, 5, 7))


def _code_order() -> npt.NDArray[np.int64]:
    thread = np.arange(32)[:, None, None, None]
    tile = np.arange(4)[None, :, None, None]
    column = thread // 4 + np.array((0, 8))[None, None, :, None]
    row = 2 * (thread % 4) + np.array((0, 1, 8, 9))[None, None, None, :]
    owned = (256 * tile + 16 * row + column).reshape(-1, 8)
    order: npt.NDArray[np.int64] = owned[:, _INTERLEAVED].reshape(-1)
    return order


CODE_ORDER = _code_order()
"""[1024]: what code of a run stands at each place."""

SCALE_ORDER = np.arange(64).reshape(8, 8).T.reshape(-1)
"""[64]: what column's scale stands at each place, where groups are parts of a column."""

SCALE_ORDER_CHANNEL = (
    2 * np.arange(4)[:, None] + np.array((0, 1, 8, 9, 16, 17, 24, 25))[None, :]
).reshape(-1)
"""[32]: the same where a column has one scale."""


def _fits(what: str, shape: tuple[int, ...], k_step: int, n_step: int) -> None:
    if len(shape) == 2 and all(shape) and shape[0] % k_step == 0 and shape[1] % n_step == 0:
        return
    near = ""
    if len(shape) == 2:
        k, n = (max(1, -(-size // s)) * s for size, s in zip(shape, (k_step, n_step), strict=True))
        near = f"; nearest [{k}, {n}]"
    raise KernelError(
        f"marlin layout: {what} of {list(shape)}: expected [{k_step} i, {n_step} j]{near}"
    )


def pack(codes_KN: _Codes) -> _Words:
    """Codes 0 to 15 [K, N] -> words [K / 16, 2 N].

    Raises:
        KernelError: K is not a multiple of 16, N not of 64, or a code is larger than 15.
    """
    _fits("codes", codes_KN.shape, TILE, 4 * TILE)
    if codes_KN.dtype != np.uint8 or codes_KN.max() > 15:
        raise KernelError(
            f"marlin layout: codes of {codes_KN.dtype} up to {codes_KN.max()}: "
            "expected uint8 of 0 to 15"
        )
    k, n = codes_KN.shape
    tiles = codes_KN.reshape(k // TILE, TILE, n // TILE, TILE).swapaxes(1, 2)
    runs = tiles.reshape(-1, _RUN)[:, CODE_ORDER]
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    words = np.bitwise_or.reduce(runs.reshape(-1, 8).astype(np.uint32) << shifts, axis=1)
    packed: _Words = words.view(np.int32).reshape(k // TILE, 2 * n)
    return packed


def unpack(words: _Words) -> _Codes:
    """Words [K / 16, 2 N] -> codes [K, N]; the inverse of :func:`pack`.

    Raises:
        KernelError: no such words: another type, or 2 N is not a multiple of 128.
    """
    _fits("words", words.shape, 1, 8 * TILE)
    if words.dtype != np.int32:
        raise KernelError(f"marlin layout: words of {words.dtype}: expected int32")
    k, n = words.shape[0] * TILE, words.shape[1] // 2
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    each = np.ascontiguousarray(words).view(np.uint32).reshape(-1, 1) >> shifts & 15
    runs = np.empty((k * n // _RUN, _RUN), np.uint8)
    runs[:, CODE_ORDER] = each.reshape(-1, _RUN)
    tiles = runs.reshape(k // TILE, n // TILE, TILE, TILE)
    return tiles.swapaxes(1, 2).reshape(k, n)


def _order(scales: _Half) -> npt.NDArray[np.int64]:
    channel = scales.shape[0] == 1
    order = SCALE_ORDER_CHANNEL if channel else SCALE_ORDER
    _fits("scales", scales.shape, 1, len(order))
    return order


def order_scales(scales_GN: _Half) -> _Half:
    """Scales [K / group, N] as the kernel reads them; one row is one scale a column.

    Raises:
        KernelError: N is not a multiple of 64, or of 32 where columns have one scale.
    """
    order = _order(scales_GN)
    return scales_GN.reshape(-1, len(order))[:, order].reshape(scales_GN.shape)


def restore_scales(ordered_GN: _Half) -> _Half:
    """The inverse of :func:`order_scales`."""
    order = _order(ordered_GN)
    out = np.empty_like(ordered_GN).reshape(-1, len(order))
    out[:, order] = ordered_GN.reshape(-1, len(order))
    return out.reshape(ordered_GN.shape)
