"""What a rank computes of each operation of the table, from its parts of the inputs.

Only an embedding, an attention with grouped heads and a mean have to know more than
the parts that they are given: which rows of the vocabulary, which heads, and how many in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.claims.lab.placed.placement import GlobalTensor
from shoal.ir.placement import Placement, local_box

Kernel: TypeAlias = Callable[
    [Sequence[Tensor], Mapping[str, Any], Sequence[GlobalTensor], tuple[int, ...]], Tensor
]


def run(
    kind: str,
    inputs: Sequence[GlobalTensor],
    attributes: Mapping[str, Any],
    shape: tuple[int, ...],
    placement: Placement,
) -> GlobalTensor:
    """Do an operation on parts that lie as one of its signatures says."""
    mesh = inputs[0].mesh
    box = local_box(shape, placement, mesh.sizes, mesh.coord)
    local = KERNELS[kind]([x.local for x in inputs], attributes, inputs, box.shape)
    return GlobalTensor(local, shape, placement, mesh)


def _plain(function: Callable[..., Tensor]) -> Kernel:
    return lambda parts, _, __, ___: function(*parts)


def _amax(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    if x.shape[dim % x.dim()]:
        return x.amax(dim, keepdim=keepdim)
    # The maximum of nothing is less than anything.
    shape = list(x.shape)
    shape[dim] = 1
    least = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    result = x.new_full(shape, least)
    return result if keepdim else result.squeeze(dim)


def _mean(
    parts: Sequence[Tensor],
    attributes: Mapping[str, Any],
    inputs: Sequence[GlobalTensor],
    _: tuple[int, ...],
) -> Tensor:
    dim = attributes["dim"]
    total: Tensor = parts[0].sum(dim, keepdim=attributes.get("keepdim", False))
    return total / float(inputs[0].shape[dim])


def _embedding(
    parts: Sequence[Tensor],
    _: Mapping[str, Any],
    inputs: Sequence[GlobalTensor],
    __: tuple[int, ...],
) -> Tensor:
    tokens, rows = parts
    first = inputs[1].box.offset[0]
    own = (tokens >= first) & (tokens < first + len(rows))
    if not len(rows):
        return rows.new_zeros((*tokens.shape, rows.shape[1]))
    tensor: Tensor = F.embedding((tokens - first).clamp(0, len(rows) - 1), rows)
    return tensor * own.unsqueeze(-1).to(tensor.dtype)


def _attention(
    parts: Sequence[Tensor],
    attributes: Mapping[str, Any],
    inputs: Sequence[GlobalTensor],
    shape: tuple[int, ...],
) -> Tensor:
    q, k, v = parts
    if 0 in shape:
        return v.new_empty(shape)
    scale = attributes.get("scale")
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=bool(attributes.get("causal", False)),
        scale=None if scale is None else float(scale),
        enable_gqa=inputs[0].shape[1] != inputs[1].shape[1],
    )


def _norm(parts: Sequence[Tensor], attributes: Mapping[str, Any], *, centred: bool) -> Tensor:
    x, *rest = parts
    size, eps = x.shape[-1:], attributes.get("eps")
    if centred:
        weight, bias = [*rest, None, None][:2]
        return F.layer_norm(x, size, weight, bias, 1e-5 if eps is None else float(eps))
    return F.rms_norm(x, size, rest[0] if rest else None, None if eps is None else float(eps))


KERNELS: dict[str, Kernel] = {
    "neg": _plain(torch.neg),
    "scale": lambda parts, a, _, __: parts[0] * a["factor"],
    "add_scalar": lambda parts, a, _, __: parts[0] + a["value"],
    "relu": _plain(torch.relu),
    "sigmoid": _plain(torch.sigmoid),
    "tanh": _plain(torch.tanh),
    "exp": _plain(torch.exp),
    "gelu": lambda parts, a, _, __: F.gelu(parts[0], approximate=a.get("approximate", "none")),
    "silu": _plain(F.silu),
    "square": _plain(torch.square),
    "sqrt": _plain(torch.sqrt),
    "log": _plain(torch.log),
    "rsqrt": _plain(torch.rsqrt),
    "reciprocal": _plain(torch.reciprocal),
    "add": _plain(torch.add),
    "sub": _plain(torch.sub),
    "mul": _plain(torch.mul),
    "div": _plain(torch.div),
    "maximum": _plain(torch.maximum),
    "sum": lambda parts, a, _, __: parts[0].sum(a["dim"], keepdim=a.get("keepdim", False)),
    "mean": _mean,
    "amax": lambda parts, a, _, __: _amax(parts[0], a["dim"], a.get("keepdim", False)),
    "softmax": lambda parts, a, _, __: torch.softmax(parts[0], a["dim"]),
    "layer_norm": lambda parts, a, _, __: _norm(parts, a, centred=True),
    "rms_norm": lambda parts, a, _, __: _norm(parts, a, centred=False),
    "matmul": _plain(torch.matmul),
    "linear": _plain(F.linear),
    "embedding": _embedding,
    "attention": _attention,
    "permute": lambda parts, a, _, __: parts[0].permute(*a["order"]),
    "reshape": lambda parts, _, __, shape: parts[0].reshape(shape),
    "narrow": lambda parts, a, _, __: parts[0].narrow(a["dim"], a["start"], a["length"]),
    "cat": lambda parts, a, _, __: torch.cat(list(parts), a["dim"]),
}
