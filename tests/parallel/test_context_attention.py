"""Every context-parallel part equals full attention, and sends what its closed form says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.core.meter import Meter
from shoal.core.parts import table
from shoal.ir.mask import Mask
from shoal.parallel.thread_comm import ThreadComm, run_ranks

PARTS: dict[str, Any] = {
    "zigzag": "zigzag",
    "ring": "ring",
    "rsa": "rsa",
    "tokenring": "tokenring",
    "all_gather": "all_gather",
    "ulysses": {"name": "ulysses", "replicate_kv": True},
    "usp": {"name": "usp", "replicate_kv": True},
    "usp4": {"name": "usp", "ulysses": 4, "replicate_kv": True},
    "double_ring": "double_ring",
    "double_ring4": {"name": "double_ring", "inner": 4},
}
# World sizes that four heads and groups of two or four can share, besides 1.
WORLDS = {
    "ulysses": [1, 2, 4],
    "usp": [1, 2, 4, 8],
    "usp4": [1, 4, 8],
    "double_ring": [1, 2, 4, 8],
    "double_ring4": [1, 4, 8],
}
LENGTH = 80
CASES = [(part, world) for part in PARTS for world in WORLDS.get(part, [1, 2, 5, 8])]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _inputs(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, dtype: torch.dtype
) -> list[Tensor]:
    rng = torch.Generator().manual_seed(5)
    shapes = [(batch, heads, length, dim)] + [(batch, kv_heads, length, dim)] * 2
    shapes.append(shapes[0])
    return [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


def _full(inputs: list[Tensor], masks: Sequence[Mask]) -> list[Tensor]:
    """Output and gradients of plain attention in float64, by autograd."""
    q, k, v, grad = (x.double() for x in inputs)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    seen = torch.from_numpy(np.stack([mask.dense() for mask in masks])).unsqueeze(1)
    scores = (q @ keys.transpose(-1, -2)) * q.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(~seen, -1e300), -1) * seen
    out = weights @ values
    out.backward(grad)
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def _run(
    choice: Any, world: int, inputs: list[Tensor], masks: Sequence[Mask], meter: Meter | None = None
) -> list[Tensor]:
    """Output and gradients of the part, gathered from all ranks."""
    part = table("context").build(choice)
    positions = [torch.from_numpy(x) for x in part.positions(inputs[0].shape[2], world)]

    def rank(comm: ThreadComm) -> list[Tensor]:
        q, k, v, grad = (x[:, :, positions[comm.rank]] for x in inputs)
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        out = part.attend(q, k, v, masks, comm)
        assert out.dtype == q.dtype
        out.backward(grad)
        return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]

    found = run_ranks(world, rank, meter=meter)
    whole = [torch.empty_like(inputs[i]) for i in (0, 0, 1, 2)]
    for places, tensors in zip(positions, found, strict=True):
        for total, piece in zip(whole, tensors, strict=True):
            total[:, :, places] = piece
    return whole


def _masks(length: int) -> dict[str, list[Mask]]:
    third = length // 3
    rows = [
        np.repeat([0, 1, 2], [third, 1, length - third - 1]),
        np.repeat([5, 4], [length - 2, 2]),
    ]
    return {
        "causal": [Mask.causal(length)],
        "full": [Mask.full(length)],
        "document": [Mask.document(ids) for ids in rows],
        "full_document": [Mask.document(rows[0], causal=False), Mask.causal(length)],
        "sliding": [Mask.sliding(length, 5)],
        "wide_sliding": [Mask.sliding(length, length // 2, causal=False)],
        "padded": [Mask.padded(length, length // 2 + 1)],
        "padded_full": [Mask.padded(length, length // 2 + 1, causal=False)],
        "blocks": [Mask.random_blocks(length, 4, 0.2, 1)],
        "nothing": [Mask.padded(length, 0)],
    }


@pytest.mark.parametrize("mask", list(_masks(LENGTH)))
@pytest.mark.parametrize(("part", "world"), CASES)
def test_a_part_is_full_attention(part: str, world: int, mask: str) -> None:
    masks = _masks(LENGTH)[mask]
    # Multi-head and grouped queries 4:1 take turns.
    kv_heads = 4 if (len(mask) + world) % 2 else 1
    inputs = _inputs(2, 4, kv_heads, LENGTH, 8, torch.float64)
    found = _run(PARTS[part], world, inputs, masks)
    for got, expected in zip(found, _full(inputs, masks), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
