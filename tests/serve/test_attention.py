"""Attention through block tables equals softmax written down."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shoal.kernel.calls import PagedAttentionCall as Call  # noqa: E402
from shoal.kernel.dispatch import dispatch  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.serve.cache.attention import PagedAttention, RequestContext, _groups  # noqa: E402
from shoal.serve.cache.paged import PagedCache  # noqa: E402


def brute(q_Hd, k_SKd, v_SKd):
    """One query over all keys it may see."""
    group = q_Hd.shape[0] // k_SKd.shape[1]
    rows = []
    for head, query in enumerate(q_Hd.double()):
        keys, values = k_SKd[:, head // group].double(), v_SKd[:, head // group].double()
        rows.append(torch.softmax(keys @ query / len(query) ** 0.5, 0) @ values)
    return torch.stack(rows)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("way", ["copies", "kernel", "exact"])
def test_ragged_step(block_size, heads, way):
    num_heads, kv_heads = heads
    kernel = None
    if way != "copies":
        call = Call(8, 100, num_heads, kv_heads, 8, block_size, "fp32")
        kernel = dispatch(
            call, wanted=None if way == "exact" else "reference", exact=way == "exact"
        )
        kernel = kernel.prepare(call)
    config = ModelConfig(
        vocab_size=8,
        hidden=16,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        ffn_hidden=8,
    )
    source = random.Random(block_size)
    # (tokens in the cache, new tokens): decodes of very different lengths, then prompts,
    # whole and continued.
    shapes = [(700, 1), (399, 1), (30, 1), (29, 1), (0, 1), (0, 9), (33, 7), (5, 40)]
    cache = PagedCache(config, 1400 // block_size + 12, block_size)
    # Whatever a block held before must not be seen.
    cache.stores[0].normal_(0, 1e3)
    free = list(range(cache.num_blocks))
    source.shuffle(free)
    torch.manual_seed(0)
    layer = 1
    whole, contexts, slots = [], [], []
    for start, length in shapes:
        stop = start + length
        blocks = [free.pop() for _ in range(-(-stop // block_size))]
        k, v = torch.randn(2, stop, kv_heads, 8)
        places = torch.tensor(
            [blocks[at // block_size] * block_size + at % block_size for at in range(stop)]
        )
        cache.write(layer, places[:start], k[:start], v[:start])
        whole.append((k, v))
        contexts.append(RequestContext(start, length, [*blocks, *free[:2]]))  # room for more
        slots.append(places[start:])
    mixer = PagedAttention(
        cache, contexts, torch.cat(slots), torch.float32, kernel, exact=way == "exact"
    )
    num_tokens = sum(length for _, length in shapes)
    q = torch.randn(num_tokens, num_heads, 8)
    new_k, new_v = (
        torch.cat([pair[side][start:] for pair, (start, _) in zip(whole, shapes, strict=True)])
        for side in (0, 1)
    )
    out = mixer(layer, q, new_k, new_v)
    row = 0
    for (k, v), (start, length) in zip(whole, shapes, strict=True):
        for at in range(start, start + length):
            expected = brute(q[row], k[: at + 1], v[: at + 1])
            assert (out[row].double() - expected).abs().max() < 1e-5
            row += 1
    keys, _ = cache.gather(layer, torch.tensor([contexts[-1].blocks[: -(-45 // block_size)]]))
    assert torch.equal(keys[0, :45], whole[-1][0])  # the new tokens are kept


def test_groups_cover_everything_and_pad_little():
    source = random.Random(3)
    for _ in range(50):
        stops = sorted(source.randrange(1, 3000) for _ in range(source.randrange(1, 65)))[::-1]
        groups = _groups(stops)
        assert [row for first, last in groups for row in range(first, last)] == list(
            range(len(stops))
        )
        for first, last in groups:
            padded = (last - first) * stops[first]
            assert padded - sum(stops[first:last]) <= max(256, padded // 3)
    assert _groups([]) == []


def test_prompts_by_a_kernel_stand_behind_trees_without_one():
    config = ModelConfig(
        vocab_size=8, hidden=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
        ffn_hidden=8,
    )  # fmt: skip
    call = Call(1, 100, 2, 1, 8, 4, "fp32", queries=8)
    kernel = dispatch(call, wanted="reference").prepare(call)
    torch.manual_seed(0)
    q, k, v = torch.randn(7, 2, 8), torch.randn(7, 1, 8), torch.randn(7, 1, 8)
    seen = np.array([1, 3, 5])
    contexts = [RequestContext(2, 3, [0, 1], seen), RequestContext(0, 4, [2])]
    slots = torch.tensor([2, 3, 4, 8, 9, 10, 11])
    results = []
    for prompts in (None, kernel):
        cache = PagedCache(config, 3, 4)
        mixer = PagedAttention(cache, contexts, slots, torch.float32, prompts=prompts)
        results.append(mixer(0, q, k, v))
    torch.testing.assert_close(*results)
