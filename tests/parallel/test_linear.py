"""Linear layers over ranks, and weight gradients that wait."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from shoal.claims.lab.thread_ranks import run_ranks  # noqa: E402
from shoal.parallel.tensor.linear import (  # noqa: E402
    ColumnLinear,
    RowLinear,
    WeightGradients,
    WholeLinear,
    grouped,
)


def layer(inputs, outputs, seed=0, bias=True):
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)


def part_of(whole, rank, world, dim):
    """This rank's rows (0) or columns (1) of a layer; the bias of rows is whole."""
    weight = whole.weight.detach().chunk(world, dim)[rank].clone()
    made = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
    made.weight = nn.Parameter(weight)
    bias = whole.bias.detach()
    made.bias = nn.Parameter((bias.chunk(world)[rank] if dim == 0 else bias).clone())
    return made


@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sp"])
@pytest.mark.parametrize("total", [8, 7])
def test_column_then_row_equals_two_whole_layers(sp, total):
    world = 2
    first, second = layer(6, 8), layer(8, 6, seed=1)
    x = torch.randn(total, 6, dtype=torch.float64)
    entry = x.clone().requires_grad_()
    expected = second(torch.tanh(first(entry)))
    expected.square().sum().backward()
    rows = -(-total // world)

    def rank(comm):
        column = ColumnLinear.of(part_of(first, comm.rank, world, 0), comm, sp=sp)
        row = RowLinear.of(part_of(second, comm.rank, world, 1), comm, sp=sp)
        own = x
        if sp:
            own = torch.cat([x, x.new_zeros(1, 6)])[comm.rank * rows : (comm.rank + 1) * rows]
        own = own.clone().requires_grad_()
        out = row(torch.tanh(column(own, total)), total)
        counted = out[: total - comm.rank * rows] if sp else out
        counted.square().sum().backward()
        grads = [column.weight.grad, column.bias.grad, row.weight.grad, row.bias.grad]
        return counted.detach(), own.grad, grads

    results = run_ranks(world, rank)
    outs, entries, grads = zip(*results, strict=True)
    if sp:
        assert torch.allclose(torch.cat(outs), expected, rtol=1e-12)
        assert torch.allclose(torch.cat(entries)[:total], entry.grad, rtol=1e-12)
        bias = sum(g[3] for g in grads)  # a rank's is over its own tokens
    else:
        assert all(torch.allclose(out, expected, rtol=1e-12) for out in outs)
        assert all(torch.allclose(g, entry.grad, rtol=1e-12) for g in entries)
        bias = grads[0][3]
    assert torch.allclose(bias, second.bias.grad, rtol=1e-12)
    assert torch.allclose(torch.cat([g[0] for g in grads]), first.weight.grad, rtol=1e-12)
    assert torch.allclose(torch.cat([g[1] for g in grads]), first.bias.grad, rtol=1e-12)
    assert torch.allclose(torch.cat([g[2] for g in grads], 1), second.weight.grad, rtol=1e-12)


def alone(check):
    """Run on the only rank."""
    return run_ranks(1, check)[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_one_rank_is_the_plain_layer_to_the_bit(bias, autocast):
    whole = layer(6, 8, bias=bias).float()
    x = torch.randn(2, 5, 6)

    def gradients(module):
        module.zero_grad()
        entry = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = module(entry)
        out.float().square().sum().backward()
        return out, entry.grad, [p.grad for p in module.parameters()]

    out, entry, grads = gradients(whole)

    def rank(comm):
        for kind in (WholeLinear, ColumnLinear, RowLinear):
            other, other_entry, others = gradients(kind.of(whole, comm))
            assert out.dtype == other.dtype and torch.equal(out, other)
            assert torch.equal(entry, other_entry)
            assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))

    alone(rank)


def test_gradients_wait_until_they_are_run_and_add_up():
    def rank(comm):
        mine = WholeLinear.of(layer(4, 3), comm)
        notes = []
        mine.weight.register_post_accumulate_grad_hook(notes.append)
        x = torch.randn(5, 4, dtype=torch.float64)
        mine(x).sum().backward()
        now = mine.weight.grad.clone()
        waiting = [WeightGradients(), WeightGradients()]
        for one in waiting:
            entry = x.clone().requires_grad_()
            out = mine(entry).sum()
            with one:
                out.backward()
            assert entry.grad is not None and len(one) == 2
        assert torch.equal(mine.weight.grad, now)
        for one in waiting:
            notes.clear()
            one.run()
            assert len(notes) == 1
            assert len(one) == 0
            one.run()  # what was done is not done again
        assert torch.equal(mine.weight.grad, now + now + now)
        mine(x).sum().backward()
        assert torch.equal(mine.weight.grad, now + now + now + now)

    alone(rank)


def test_what_needs_no_gradient_gets_none():
    def rank(comm):
        mine = WholeLinear.of(layer(4, 3), comm)
        mine.weight.requires_grad_(False)
        x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
        waiting = WeightGradients()
        out = mine(x).sum()
        with waiting:
            out.backward()
        waiting.run()
        assert mine.weight.grad is None and mine.bias.grad.tolist() == [5.0] * 3
        with torch.no_grad():
            assert not mine(x).requires_grad

    alone(rank)


def test_each_rank_has_its_own_waiting_gradients():
    def rank(comm):
        mine = WholeLinear.of(layer(4, 3), comm)
        out = mine(torch.ones(1, 4, dtype=torch.float64)).sum()
        waiting = WeightGradients()
        if comm.rank == 0:
            with waiting:
                comm.barrier()
                out.backward()
                comm.barrier()
        else:
            comm.barrier()
            out.backward()
            comm.barrier()
        return len(waiting), mine.weight.grad is None

    assert run_ranks(2, rank) == [(2, True), (0, False)]


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 5], [5, 0, 0]])
def test_grouped_equals_one_expert_after_another(counts):
    torch.manual_seed(0)
    rows = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r, w: grouped(r, w, counts), (rows, weight))
    expected = torch.cat([r @ w.T for r, w in zip(rows.split(counts), weight, strict=True)])
    result = grouped(rows, weight, counts)
    assert torch.allclose(result, expected, rtol=1e-13)
    grads = torch.autograd.grad(expected.square().sum(), (rows, weight))
    waiting = WeightGradients()
    with waiting:
        result.square().sum().backward()
    assert weight.grad is None
    waiting.run()
    assert torch.allclose(rows.grad, grads[0]) and torch.allclose(weight.grad, grads[1])
