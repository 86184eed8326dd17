"""Seconds of single kernels: matrix products by shape, attention, streams.

A product is cut into tiles that the device's units compute in waves; the last wave is
rarely full, and a short inner dimension leaves the pipeline of a tile half empty. It takes
no less than the bytes of its operands need.

Sources: NVIDIA, Matrix Multiplication Background, 2023 (tile and wave quantisation); Dao,
FlashAttention-2, 2023 (operations of tiled attention: 4 products forward, 10 backward, over
the causal half).
"""

from __future__ import annotations

import functools
import math

from shoal.cost.gpu.device import Accelerator, GpuCalibration

# Tiles of the library's kernels, and the share of the full rate that their inner loop reaches.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.80), (64, 64, 0.62))
# Inner dimension at which filling and draining a tile's pipeline takes as long as its work.
FILL = 192.0
# Sequence at which a tiled attention kernel reaches half of its rate.
HALF_RATE = 700.0
# A tile of a grouped product is shared by no two members, and its rows are gathered.
GROUPED = 0.85
# One kernel takes at least this long, and follows the last one after this gap.
GAP_S = 3e-6
# Share of the shorter of computing and moving that the longer one does not hide.
UNHIDDEN = 0.25
# Rate of tensor units by the largest power of two, up to 64, that divides a product's sides.
ALIGNED = {64: 1.0, 32: 0.97, 16: 0.92, 8: 0.80, 4: 0.40, 2: 0.30, 1: 0.25}
WIDTH = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "fp4": 0.5}


@functools.lru_cache(maxsize=65536)
def gemm_s(
    M: float,
    N: float,
    K: float,
    gpu: Accelerator,
    k: GpuCalibration,
    dtype: str = "bf16",
    groups: int = 1,
    adds: float = 0.0,
) -> float:
    """Seconds of ``groups`` equal products [M, K] x [K, N] that run as one kernel.

    Args:
        M: rows.
        N: columns.
        K: inner dimension.
        gpu: the device.
        k: measured constants.
        dtype: of the operands.
        groups: equal products of the kernel.
        adds: bytes of a cell of the result that is read, added to and written; 0 where the
            result is written alone.
    """
    if min(M, N, K) <= 0:
        return 0.0
    units = gpu.facts.units
    best = 0.0
    for tall, wide, share in TILES:
        tiles = groups * math.ceil(M / tall) * math.ceil(N / wide)
        full = math.ceil(tiles / units) * units
        best = max(best, share * groups * M * N / (full * tall * wide))
    low = dtype in ("fp8", "fp4")
    kept = 1.0 if gpu.sustained else k.gemm_low if low else k.gemm
    rate = gpu.rate(dtype) * kept * best * K / (K + FILL)
    rate *= aligned(N) * aligned(K)
    flops = 2.0 * groups * M * N * K
    moved = groups * (WIDTH[dtype] * (M * K + N * K) + (2.0 * adds or 2.0) * M * N)
    busy, wait = flops / rate, moved / (k.stream * gpu.stream)
    return max(busy, wait) + UNHIDDEN * min(busy, wait) + GAP_S


def aligned(side: float) -> float:
    """Share of the rate that a side of this length allows."""
    whole = int(side)
    return ALIGNED[math.gcd(whole, 64)] if whole == side and whole > 0 else 1.0


def stream_s(moved: float, gpu: Accelerator, k: GpuCalibration) -> float:
    """Seconds of elementwise kernels that read and write ``moved`` bytes."""
    return moved / (k.stream * gpu.stream)


def attention_s(
    *,
    heads: float,
    queries: float,
    keys: float,
    head_dim: float,
    value_dim: float,
    kernel: str,
    gpu: Accelerator,
    k: GpuCalibration,
    backward: bool,
    causal: bool = True,
) -> float:
    """Seconds of attention of ``heads`` heads (of all sequences) on one device.

    Args:
        heads: heads of all sequences together.
        queries: tokens that ask.
        keys: tokens that are asked; with ``causal`` half of them, on average.
        head_dim: width of queries and keys.
        value_dim: width of values.
        kernel: plain (products and softmax over the whole square), flash1, flash2, best.
        gpu: the device.
        k: measured constants.
        backward: the backward pass.
        causal: the mask.
    """
    cells = heads * queries * keys
    kept = 1.0 if gpu.sustained else k.gemm
    if kernel == "plain":
        # The square is written and read by products, scaling, mask and softmax, dropout.
        flops = 2.0 * cells * (head_dim + value_dim) * (2.0 if backward else 1.0)
        passes = 22.0 if backward else 13.0
        rate = 0.5 * kept * gpu.rate("bf16") * aligned(head_dim)
        return flops / rate + stream_s(passes * cells, gpu, k) + 4 * GAP_S
    half = 0.5 * cells if causal else cells
    products = (3 * head_dim + 2 * value_dim) if backward else (head_dim + value_dim)
    flops = 2.0 * half * products
    table = gpu.facts.attention
    share = table.get(kernel, table["flash2"])[1 if backward else 0]
    half = gpu.facts.half if kernel == "best" else HALF_RATE
    share *= min(1.0, 0.5 + head_dim / 256.0) * keys / (keys + half)
    # The shares are of the peak of a device that reaches the generation's usual rate.
    return flops / (share * kept * gpu.rate("bf16") / gpu.facts.reach) + GAP_S
