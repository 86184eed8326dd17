"""Products in row tiles equal the whole product; every byte is a ring's; what cannot be cut."""

from __future__ import annotations

import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import same_as_one
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import ConfigError, PlanError
from shoal.core.meter import Meter
from shoal.parallel.legal import check_split
from shoal.parallel.overlap.tile import cut, gathered_product, reduced_product, scattered_product
from shoal.parallel.tensor.linear import ColumnLinear, RowLinear


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _rows(whole: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """This rank's rows, zero where there are none."""
    rows = -(-len(whole) // world)
    padded = torch.nn.functional.pad(whole, (0, 0, 0, rows * world - len(whole)))
    return padded[rank * rows : (rank + 1) * rows]


@pytest.mark.parametrize("total", [8, 21])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("tiles", [1, 2, None])
def test_scattered_and_reduced_products_equal_the_unsplit_one(world, total, tiles):
    x, weight = _values(total, 6 * world, seed=1), _values(6 * world, 5, seed=2)
    expected = x @ weight

    def on(comm):
        mine = slice(6 * comm.rank, 6 * comm.rank + 6)
        out, pending = scattered_product(x[:, mine], weight[mine], comm, tiles=tiles)
        pending.wait()
        torch.testing.assert_close(out, _rows(expected, world, comm.rank))
        whole, pending = reduced_product(x[:, mine], weight[mine], comm, tiles=tiles)
        pending.wait()
        torch.testing.assert_close(whole, expected)
        return whole

    first, *others = run_ranks(world, on)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("total", [8, 21])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gathered_product_equals_the_unsplit_one(world, total):
    x, weight = _values(total, 6, seed=1), _values(6, 5, seed=2)

    def on(comm):
        rows, out = gathered_product(_rows(x, world, comm.rank), weight, comm, total)
        torch.testing.assert_close(rows, x)
        torch.testing.assert_close(out, x @ weight)

    run_ranks(world, on)


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_sends_what_a_ring_sends(world):
    x, weight = _values(16, 3, seed=1), _values(3, 5, seed=2)
    meter = Meter()
    run_ranks(world, lambda comm: scattered_product(x, weight, comm)[1].wait(), meter=meter)
    share = (world - 1) / world
    assert _sent(meter) == world * share * 16 * 5 * 8
    meter = Meter()
    run_ranks(
        world,
        lambda comm: gathered_product(x[: 16 // world].clone(), weight, comm, 16),
        meter=meter,
    )
    assert _sent(meter) == world * share * 16 * 3 * 8


def _sent(meter: Meter) -> float:
    return sum(v for name, v in meter.totals().items() if name.startswith("wire_bytes"))


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_tiled_layers_equal_whole_ones_forward_and_backward(world, bias, sp):
    total, hidden, inner = 13, 5, 6 * world
    x = _values(total, hidden, seed=1)
    up, down = _values(inner, hidden, seed=2), _values(hidden, inner, seed=3)
    up_bias, down_bias = _values(inner, seed=4), _values(hidden, seed=5)
    towards = _values(total, hidden, seed=6)

    whole = [t.clone().requires_grad_() for t in (x, up, up_bias, down, down_bias)]
    first = torch.nn.functional.linear(whole[0], whole[1], whole[2] if bias else None)
    out = torch.nn.functional.linear(first.tanh(), whole[3], whole[4] if bias else None)
    (out * towards).sum().backward()

    def layer(kind, comm, weight, of_bias):
        made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias, dtype=torch.float64)
        with torch.no_grad():
            made.weight.copy_(weight)
            if bias:
                made.bias.copy_(of_bias)
        return kind.of(made, comm, sp=sp, overlap="tile")

    def on(comm):
        mine = slice(6 * comm.rank, 6 * comm.rank + 6)
        column = layer(ColumnLinear, comm, up[mine], up_bias[mine])
        row = layer(RowLinear, comm, down[:, mine], down_bias)
        assert column.tiled
        assert row.tiled
        given = (_rows(x, world, comm.rank) if sp else x).clone().requires_grad_()
        got = row(column(given, total).tanh(), total)
        weigh = _rows(towards, world, comm.rank) if sp else towards
        (got * weigh).sum().backward()
        expected = out.detach()
        rows = -(-total // world)
        real = min(rows, total - comm.rank * rows) if sp else total
        torch.testing.assert_close(
            got.detach()[:real], (_rows(expected, world, comm.rank) if sp else expected)[:real]
        )
        of_x = _rows(whole[0].grad, world, comm.rank) if sp else whole[0].grad
        torch.testing.assert_close(given.grad, of_x)
        torch.testing.assert_close(column.weight.grad, whole[1].grad[mine])
        torch.testing.assert_close(row.weight.grad, whole[3].grad[:, mine])
        if bias:
            torch.testing.assert_close(column.bias.grad, whole[2].grad[mine])
        return row.bias.grad if bias else None

    grads = run_ranks(world, on)
    if bias:
        summed = sum(grads) if sp else grads[0]
        torch.testing.assert_close(summed, whole[4].grad)


@pytest.mark.parametrize(
    "parallel",
    [
        {"tp": 2},
        {"tp": 2, "sp": True},
        {"tp": 4},
        {"tp": 4, "sp": True},
        {"tp": 2, "cp": 2, "sp": True},
        {"tp": 2, "pp": 2, "sp": True, "schedule": "zb_h1"},
    ],
    ids=str,
)
@pytest.mark.slow
def test_same_as_one(parallel):
    result = same_as_one(job({**parallel, "overlap": "tile"}), config(num_layers=4), documents=True)
    assert result.same, str(result)


@pytest.mark.slow
def test_same_as_one_with_recomputation_and_experts():
    split = {"tp": 2, "sp": True, "overlap": "tile"}
    result = same_as_one(job(split, recompute="full", dropout=0.1), config(num_layers=2))
    assert result.same, str(result)
    experts = config(num_layers=2, family="mixtral", num_experts=4, top_k=2)
    result = same_as_one(job(split), experts)
    assert result.same, str(result)


def test_tiles_of_rows():
    assert [s.stop - s.start for s in cut(10, 4)] == [2, 3, 2, 3]
    assert len(cut(2)) == 2
    assert len(cut(100)) == 4


@pytest.mark.parametrize("tiles", [0, 5])
def test_fewer_rows_than_tiles_are_refused(tiles):
    with pytest.raises(ConfigError, match=r"overlap\.tiles = \d"):
        run_ranks(
            2, lambda comm: scattered_product(torch.ones(8, 2), torch.ones(2, 2), comm, tiles=tiles)
        )


def test_outputs_that_are_not_contiguous_are_refused():
    with pytest.raises(ConfigError, match=r"overlap\.out"):
        run_ranks(
            2,
            lambda comm: scattered_product(
                torch.ones(8, 2), torch.ones(2, 2), comm, out=torch.empty(2, 4).T
            ),
        )
    with pytest.raises(ConfigError, match=r"overlap\.rows"):
        run_ranks(
            2,
            lambda comm: gathered_product(torch.ones(2, 4).T, torch.ones(2, 2), comm, 8),
        )


def test_a_job_whose_ranks_have_fewer_rows_than_tiles_is_refused():
    with pytest.raises(PlanError, match=r"parallel\.overlap"):
        check_split(job({"tp": 4, "overlap": "tile"}, seq_len=8, microbatch=1), config().shape())
