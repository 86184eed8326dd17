"""Parts of a context, put together in any order, are the whole."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import KernelError
from shoal.kernel.calls import PagedAttentionCall
from shoal.kernel.dispatch import kernels_of
from shoal.kernel.paged.partial import attend_part, merge


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """In fp64, all at once; 0 for queries that see nothing."""
    heads, kv_heads = q.shape[1], k.shape[1]
    keys = k.double().repeat_interleave(heads // kv_heads, 1)
    values = v.double().repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("nhd,shd->hns", q.double(), keys) / math.sqrt(q.shape[2])
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hns,shd->nhd", weights, values)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    seen=st.integers(1, 90),
    parts=st.integers(1, 8),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.integers(1, 3),
    d=st.sampled_from([1, 8, 24]),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_any_cut_in_any_order_is_the_whole(
    seed: int, seen: int, parts: int, kv_heads: int, group: int, d: int, scale: float
) -> None:
    torch.manual_seed(seed)
    # Scores in the hundreds are themselves known to 1e-5 in fp32, however they are summed.
    kind = torch.float64 if scale > 1 else torch.float32
    q = torch.randn(3, kv_heads * group, d, dtype=kind) * scale
    k, v = torch.randn(2, seen, kv_heads, d, dtype=kind)
    hidden = torch.rand(3, seen) < 0.3
    hidden[0] = True  # this one sees nothing
    chance = random.Random(seed)
    # Cuts may coincide: such parts have no tokens.
    cuts = [0, *sorted(chance.randint(0, seen) for _ in range(parts - 1)), seen]
    records = [
        attend_part(q, k[first:last], v[first:last], hidden[:, first:last])
        for first, last in itertools.pairwise(cuts)
    ]
    chance.shuffle(records)
    expected = whole(q, k, v, hidden)
    torch.testing.assert_close(merge(records).double(), expected, rtol=1e-6, atol=1e-6)


def test_an_average_of_parts_is_not_the_whole() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 8), torch.randn(40, 2, 8), torch.randn(40, 2, 8)
    records = [attend_part(q, k[:8], v[:8]), attend_part(q, k[8:], v[8:])]
    mean = sum(merge([one]) for one in records) / 2
    assert float((mean - merge(records)).abs().max()) > 1e-2


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_parts_that_kernels_read_from_pages(backend: str, dtype: str) -> None:
    call = PagedAttentionCall(2, 300, 6, 2, 32, 16, dtype, partial=True)  # type: ignore[arg-type]
    kernel = kernels_of("paged_attention")[backend]
    if kernel.refuses(call):
        pytest.skip(str(kernel.refuses(call)))
    torch.manual_seed(1)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    keys, values = torch.randn(64 * 16, 2, 32).to(kind), torch.randn(64 * 16, 2, 32).to(kind)
    q = torch.randn(2, 6, 32).to(kind)
    ready, order = kernel.prepare(call), torch.randperm(64).to(torch.int32)
    seen = torch.tensor([300, 17])
    split = 7 * 16
    records = [
        ready(q[:1], keys, values, order[None, :7], torch.tensor([split])),
        ready(q[:1], keys, values, order[None, 7:], seen[:1] - split),
    ]
    slots = (order.long()[:, None] * 16 + torch.arange(16)).reshape(-1)[:300]
    expected = whole(q[:1], keys[slots], values[slots], torch.zeros(1, 300, dtype=torch.bool))
    close = 1e-6 if dtype == "fp32" else 1e-2  # bf16: weights are rounded
    assert records[0].dtype == torch.float32
    torch.testing.assert_close(merge(records).double(), expected, rtol=close, atol=close)
    both = ready(q, keys, values, order.view(2, 32), seen)
    assert both.shape == (2, 6, 34)
    alone = ready(q[1:], keys, values, order[None, 32:], seen[1:])
    torch.testing.assert_close(both[1:], alone, rtol=0, atol=0)


def test_who_gives_whole_results_only_refuses_parts() -> None:
    call = PagedAttentionCall(1, 64, 4, 4, 32, partial=True)
    for name in ("torch", "amx", "triton"):
        with pytest.raises(KernelError):
            kernels_of("paged_attention")[name].prepare(call)
