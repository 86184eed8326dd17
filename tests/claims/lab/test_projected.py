"""Projected attention over ranks equals Linformer attention on one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.claims.lab.projected import linformer, projected_attention
from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.errors import ConfigError
from shoal.core.meter import Meter


def _inputs(length: int, rows: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(7)
    q, grad = torch.randn(2, 2, 4, length, 8, generator=rng, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, length, 8, generator=rng, dtype=torch.float64)
    maps = torch.randn(2, rows, length, generator=rng, dtype=torch.float64) / length**0.5
    return [q, k, v, maps[0], maps[1], grad]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_projected_attention_is_linformer(world: int) -> None:
    length, rows = 32, 8
    inputs = _inputs(length, rows)
    whole = [x.clone().requires_grad_() for x in inputs[:5]]
    expected = linformer(*whole)
    torch.autograd.backward(expected, inputs[5])
    meter = Meter()

    def rank(comm: ThreadComm) -> list[Tensor]:
        part = [x.chunk(world, -1 if x.ndim == 2 else 2)[comm.rank] for x in inputs]
        own = [x.clone().requires_grad_() for x in part[:5]]
        q, k, v, key_map, value_map = own
        out = projected_attention(q, k, v, key_map, value_map, comm)
        torch.autograd.backward(out, part[5])
        return [out.detach(), *(x.grad for x in own if x.grad is not None)]

    ranks = run_ranks(world, rank, meter=meter)
    references = [expected.detach(), *(x.grad for x in whole if x.grad is not None)]
    for got, reference in zip(zip(*ranks, strict=True), references, strict=True):
        joined = torch.cat(got, -1 if reference.ndim == 2 else 2)
        torch.testing.assert_close(joined, reference, rtol=1e-10, atol=1e-10)
    # Forward and backward, k rows of keys and values are all-reduced, whatever the length is.
    sent = 2 * 8 * (4 * 2 * rows * 2 * 8 * (world - 1) // world)
    assert sum(meter.totals().values()) == world * sent
    if world > 1:
        # Twice the sequence, not a byte more.
        longer = Meter()
        inputs[:] = _inputs(2 * length, rows)
        run_ranks(world, rank, meter=longer)
        assert sum(longer.totals().values()) == world * sent


def test_shapes_that_do_not_fit() -> None:
    q, k, v, key_map, value_map, _ = _inputs(32, 8)
    with pytest.raises(ConfigError, match="K a divisor of H"):
        linformer(q[:, :3], k, v, key_map, value_map)
    with pytest.raises(ConfigError, match=r"twice \[k, 32\]"):
        linformer(q, k, v, key_map[:, :16], value_map)
