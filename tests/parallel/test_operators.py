"""Communication with a gradient: forward, and that backward is its mirror."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.claims.lab.thread_ranks import run_ranks  # noqa: E402
from shoal.parallel.tensor.operators import (  # noqa: E402
    copy_to,
    enter,
    gather_tokens,
    leave,
    local_rows,
    local_tokens,
    reduce_from,
    reduce_scatter_tokens,
    scatter_tokens,
)


def tensor(seed, rows):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=source, dtype=torch.float64)


def through(world, function, rows_in, rows_out):
    """Inputs, outputs, gradients given and gradients got, of every rank."""

    def rank(comm):
        x = tensor(comm.rank, rows_in).requires_grad_()
        y = function(x, comm)
        assert y.shape == (rows_out, 3)
        grad = tensor(100 + comm.rank, rows_out)
        given = grad.clone()
        y.backward(grad)
        assert torch.equal(grad, given)
        return x.detach(), y.detach(), grad, x.grad

    return zip(*run_ranks(world, rank), strict=True)


def padded(x, rows):
    return torch.cat([x, x.new_zeros(rows - len(x), 3)])


def test_copy_and_reduce_are_conjugate():
    xs, ys, given, got = through(2, copy_to, 5, 5)
    assert all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))
    assert all(torch.equal(g, sum(given)) for g in got)
    xs, ys, given, got = through(2, reduce_from, 5, 5)
    assert all(torch.equal(y, sum(xs)) for y in ys)
    assert all(torch.equal(a, b) for a, b in zip(given, got, strict=True))


@pytest.mark.parametrize("total", [8, 7, 5])
def test_gather_and_reduce_scatter_are_conjugate(total):
    rows = local_tokens(total, 4)
    xs, ys, given, got = through(4, lambda x, c: gather_tokens(x, c, total), rows, total)
    assert all(torch.equal(y, torch.cat(xs)[:total]) for y in ys)
    assert torch.equal(torch.cat(got), padded(sum(given), 4 * rows))
    xs, ys, given, got = through(4, reduce_scatter_tokens, total, rows)
    assert torch.equal(torch.cat(ys), padded(sum(xs), 4 * rows))
    assert all(torch.equal(g, torch.cat(given)[:total]) for g in got)


@pytest.mark.parametrize("total", [8, 7])
def test_scatter_gathers_its_gradients(total):
    rows = local_tokens(total, 2)
    xs, ys, given, got = through(2, scatter_tokens, total, rows)
    assert all(
        torch.equal(y, padded(x, 8)[4 * r : 4 * r + 4])
        for r, (x, y) in enumerate(zip(xs, ys, strict=True))
    )
    assert all(torch.equal(g, torch.cat(given)[:total]) for g in got)


def test_one_rank_communicates_nothing():
    def rank(comm):
        x = tensor(0, 4)
        assert enter(x, comm, 4, sp=True) is x and leave(x, comm, sp=False) is x
        assert not comm.meter.totals()

    run_ranks(1, rank)


def test_rows_beyond_the_last_have_the_value_asked_for():
    def rank(comm):
        return local_rows(torch.arange(5), comm, -100)

    assert torch.cat(run_ranks(4, rank)).tolist() == [0, 1, 2, 3, 4, -100, -100, -100]
