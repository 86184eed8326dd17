"""Triton's products and attention: beside cuBLAS, SDPA, and products of 4-bit weights.

See :mod:`gpu.kernel_case`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from gpu.frame import Case
from gpu.kernel_case import Problem, Problems, cases_of
from gpu.place import Place
from shoal.kernel.calls import LinearCall, LowbitLinearCall, MatmulPlanesCall, PagedAttentionCall
from shoal.kernel.formats import weight_format
from shoal.kernel.grouped.call import GroupedLinear
from shoal.kernel.planes.layout import pack as planes_of

NEEDS = ("torch", "triton")


def cases(place: Place) -> Iterator[Case]:
    """Products of few and many rows, of experts and of planes; paged attention."""
    return cases_of(place, problems(place))


def problems(place: Place) -> Problems:
    """Of a model of 1 B parameters."""
    pick, device = place.pick, place.device
    kind = pick("bf16", "fp32")
    dtype = pick(torch.bfloat16, torch.float32)
    randn = functools.partial(torch.randn, device=device, dtype=dtype)

    def linear(m: int) -> Problem:
        n, k = pick((8192, 2048), (32, 48))
        weight = randn(n, k)
        return Problem(LinearCall(m, n, k, kind, device), (weight,), (randn(m, k),),
                       backends=("torch",))  # fmt: skip

    def lowbit(m: int) -> Problem:
        n, k = pick((8192, 2048), (64, 128))
        packed = weight_format("int4-g128").quantize(torch.randn(n, k, device=device))
        call = LowbitLinearCall(m, n, k, "int4-g128", 4.125, kind, device)
        peers = {} if place.dry else {"torch int4": _tinygemm(packed, n, k)}
        return Problem(call, (packed,), (randn(m, k),), peers, ("dequantised",))

    def paged(batch: int, context: int) -> Problem:
        heads, kv, d, size = pick((32, 8, 64, 16), (4, 2, 16, 4))
        call = PagedAttentionCall(batch, context, heads, kv, d, size, kind, device=device)
        held = -(-context // size)
        order = torch.randperm(batch * held, device=device)
        k, v = (randn(batch * held * size, kv, d) for _ in range(2))
        lengths = torch.full((batch,), context, device=device)
        blocks = order.view(batch, held).int()
        given = (randn(batch, heads, d), k, v, blocks, lengths)
        # What FlashAttention reads lies side by side already: it is not paged, and so a bound.
        sides = [x.view(-1, size, kv, d)[blocks.long()].flatten(1, 2).transpose(1, 2)
                 for x in (k, v)]  # fmt: skip
        flat = [side[:, :, :context].contiguous() for side in sides]

        def sdpa(q: torch.Tensor, *_: Any) -> torch.Tensor:
            return F.scaled_dot_product_attention(q[:, :, None], *flat, enable_gqa=True)[:, :, 0]

        peers = {"SDPA, not paged": sdpa}
        if not place.dry and importlib.util.find_spec("flash_attn"):
            peers["flash_attn, not paged"] = _flash(flat)
        return Problem(call, (), given, peers, ("torch",))

    def planes() -> Problem:
        m, n, k, bits = pick((64, 8192, 2048, 4), (5, 18, 65, 2))
        x, w = (2 * torch.randint(0, 2**bits, (rows, k)) - (2**bits - 1) for rows in (m, n))
        call = MatmulPlanesCall(m=m, n=n, k=k, w=bits, a=bits, device=device)
        given = tuple(planes_of(one, bits).to(device) for one in (x, w))
        eight = [one.to(device, torch.int8) for one in (x, w)]
        peers = {} if place.dry else {"int8, cuBLAS": lambda _: torch._int_mm(eight[0], eight[1].T)}
        return Problem(call, given[1:], given[:1], peers)

    def grouped(gradients: int) -> Problem:
        experts, rows, n, k = pick((64, 4096, 1024, 2048), (3, 12, 16, 16))
        counts = [rows // experts] * experts
        call = GroupedLinear(rows, experts, n, k, dtype=kind, device=device)
        return Problem(call, (), (randn(rows, k), randn(experts, n, k), counts),
                       backends=("torch", "loop"), gradients=gradients)  # fmt: skip

    for m in pick((1, 16, 256), (2,)):
        yield f"linear, {m} rows", functools.partial(linear, m)
        yield f"linear_lowbit int4-g128, {m} rows", functools.partial(lowbit, m)
    for batch, context in pick(((1, 4096), (256, 1024)), ((2, 7),)):
        name = f"paged_attention, {batch} x {context} tokens"
        yield name, functools.partial(paged, batch, context)
    yield "matmul_planes, 4 x 4 bits", planes
    yield "grouped_linear, 64 experts", functools.partial(grouped, 0)
    yield "grouped_linear and its gradients", functools.partial(grouped, 2)


def _flash(flat: list[torch.Tensor]) -> Callable[..., Any]:
    from flash_attn import flash_attn_with_kvcache

    k, v = (side.transpose(1, 2).contiguous() for side in flat)
    return lambda q, *_: flash_attn_with_kvcache(q[:, None], k, v)[:, 0]


def _tinygemm(packed: Any, n: int, k: int, group: int = 128) -> Callable[..., Any]:
    """PyTorch's product of 4-bit weights on a GPU, which takes bf16 scales."""
    codes = weight_format(packed.format).unpack(packed).to(torch.int32)
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    weight = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    scales = packed.tensors["scales"].to(torch.bfloat16)
    # Its zero is code 8, as ours is; what is added to it is 0.
    both = torch.stack((scales, torch.zeros_like(scales)), -1).transpose(0, 1).contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, weight, group, both)
