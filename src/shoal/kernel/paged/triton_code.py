"""The Triton kernels of :mod:`shoal.kernel.paged.triton`; imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decoded(
    codes: tl.tensor,
    scales: tl.tensor,
    slot: tl.tensor,
    some: tl.tensor,
    head: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    scale_slot: tl.tensor,
    scale_head: tl.tensor,
    D: tl.constexpr,
    DP: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Keys or values [tokens, DP] of one head, in fp32."""
    dims = tl.arange(0, DP)[None, :]
    here = some[:, None] & (dims < D)
    row = codes + slot[:, None] * slot_stride + head * head_stride
    scale_row = scales + slot[:, None] * scale_slot + head * scale_head
    if FORM == 0:
        x = tl.load(row + dims, mask=here, other=0).to(tl.float32)
    elif FORM == 1:
        scale = tl.load(scale_row, mask=some[:, None], other=0)
        x = tl.load(row + dims, mask=here, other=0).to(tl.float32) * scale
    else:
        exponent = tl.load(scale_row + dims // BLOCK, mask=here, other=0).to(tl.int32)
        if FORM == 2:
            half: tl.constexpr = BLOCK // 2
            byte = tl.load(row + dims // BLOCK * half + dims % half, mask=here, other=0)
            upper = (dims % BLOCK) // half
            code = ((byte.to(tl.int32) >> (4 * upper)) & 15) - 8
            x = code.to(tl.float32) * tl.exp2((exponent - 129).to(tl.float32))
        else:
            byte = tl.load(row + dims, mask=here, other=0).to(tl.int8, bitcast=True)
            x = byte.to(tl.float32) * tl.exp2((exponent - 133).to(tl.float32))
        x = tl.where(here, x, 0.0)
    return x


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def chunks(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    blocks: tl.tensor,
    lengths: tl.tensor,
    requests: tl.tensor,
    tree: tl.tensor,
    sums: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    scale: tl.tensor,
    most: tl.tensor,
    width: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_slot: tl.tensor,
    k_head: tl.tensor,
    v_slot: tl.tensor,
    v_head: tl.tensor,
    ks_slot: tl.tensor,
    ks_head: tl.tensor,
    vs_slot: tl.tensor,
    vs_head: tl.tensor,
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE: tl.constexpr,
) -> None:
    """One chunk of tokens, for one row and the queries of one key/value head."""
    row, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seen = tl.load(lengths + row)
    first = chunk * CHUNK
    if first < seen:
        request = tl.load(requests + row)
        if TREE:
            root = tl.load(tree + row)
            bits = tl.load(tree + tl.num_programs(0) + row)
        member = tl.arange(0, GP)
        dims = tl.arange(0, DP)
        here = (member[:, None] < GROUP) & (dims[None, :] < D)
        at = q + row * q_row + (head * GROUP + member)[:, None] * q_head + dims[None, :]
        query = tl.load(at, mask=here, other=0).to(tl.float32)
        top = tl.full((GP,), -3e38, tl.float32)
        total = tl.zeros((GP,), tl.float32)
        mixed = tl.zeros((GP, DP), tl.float32)
        for start in range(first, tl.minimum(first + CHUNK, seen), STEP):
            token = start + tl.arange(0, STEP)
            some = token < seen
            block = tl.load(blocks + request * width + token // SIZE, mask=some, other=0)
            slot = block.to(tl.int64) * SIZE + token % SIZE
            keys = _decoded(
                k, k_scales, slot, some, head, k_slot, k_head, ks_slot, ks_head, D, DP, FORM, BLOCK
            )
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
            visible = some
            if TREE:
                place = token - root
                bit = (bits >> tl.minimum(tl.maximum(place, 0), 63)) & 1
                visible = some & ((place < 0) | (bit != 0))
            scores = tl.where(visible[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            worth = tl.exp2(top - higher)
            weights = tl.exp2(scores - higher[:, None])
            values = _decoded(
                v, v_scales, slot, some, head, v_slot, v_head, vs_slot, vs_head, D, DP, FORM, BLOCK
            )
            mixed = mixed * worth[:, None] + tl.dot(weights, values, input_precision="ieee")
            total = total * worth + tl.sum(weights, 1)
            top = higher
        place = ((row * tl.num_programs(1) + head) * most + chunk) * GP + member
        tl.store(tops + place, top)
        tl.store(totals + place, total)
        tl.store(sums + place[:, None] * DP + dims[None, :], mixed)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def fold(
    out: tl.tensor,
    lengths: tl.tensor,
    sums: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    most: tl.tensor,
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """The chunks of one row and one key/value head, in their order."""
    row, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    seen = tl.load(lengths + row)
    member = tl.arange(0, GP)
    dims = tl.arange(0, DP)
    top = tl.full((GP,), -3e38, tl.float32)
    total = tl.zeros((GP,), tl.float32)
    mixed = tl.zeros((GP, DP), tl.float32)
    for chunk in range(tl.cdiv(seen, CHUNK)):
        place = ((row * heads + head) * most + chunk) * GP + member
        other = tl.load(tops + place)
        higher = tl.maximum(top, other)
        a, b = tl.exp2(top - higher), tl.exp2(other - higher)
        part = tl.load(sums + place[:, None] * DP + dims[None, :])
        mixed = mixed * a[:, None] + part * b[:, None]
        total = total * a + tl.load(totals + place) * b
        top = higher
    here = (member[:, None] < GROUP) & (dims[None, :] < D)
    at = out + ((row * heads + head) * GROUP + member)[:, None] * D + dims[None, :]
    tl.store(at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=here)
