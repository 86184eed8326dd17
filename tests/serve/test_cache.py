"""The tensors of the paged cache."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ServeError  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.serve.cache.paged import PagedCache, token_bytes  # noqa: E402

CONFIG = ModelConfig(
    vocab_size=8, hidden=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, ffn_hidden=8
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 4])
def test_what_is_written_is_gathered(dtype, block_size):
    cache = PagedCache(CONFIG, 12, block_size, dtype=dtype)
    assert cache.nbytes == 12 * block_size * token_bytes(CONFIG, dtype)
    assert not cache.stores[0].any()
    blocks = torch.tensor([7, 2, 11])
    count = 3 * block_size
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).reshape(-1)
    k, v = torch.randn(2, count, 2, 4).to(dtype)
    cache.write(1, slots, k, v)
    keys, values = cache.gather(1, blocks[None])
    assert torch.equal(keys[0], k)
    assert torch.equal(values[0], v)
    both, _ = cache.gather(1, torch.tensor([[2, 7], [11, 7]]))
    assert torch.equal(both[1, :block_size], k[2 * block_size :])
    assert torch.equal(both[0, block_size:], k[:block_size])
    assert not cache.stores[0][0].any()
    assert int(cache.stores[0][1].any(-1).any(-1).sum()) == 2 * count  # nothing else was touched


def test_room_is_needed():
    with pytest.raises(ServeError, match="at least one block"):
        PagedCache(CONFIG, 0, 16)
    with pytest.raises(ServeError, match="smaller kv_tokens"):
        PagedCache(CONFIG, 2**40, 16)
