"""The vocabulary shared by ranks, against the unsplit embedding and loss, in fp64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

from shoal.claims.lab.thread_ranks import run_ranks  # noqa: E402
from shoal.model.loss import token_loss_sum  # noqa: E402
from shoal.parallel.tensor.operators import copy_to, gather_tokens, local_rows  # noqa: E402
from shoal.parallel.tensor.slices import vocabulary_rows  # noqa: E402
from shoal.parallel.vocab import layers as module  # noqa: E402
from shoal.parallel.vocab.layers import VocabularyTable, split_loss_sum  # noqa: E402

WIDTH = 8


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def data(vocab, count=23, scale=1.0, dtype=torch.float64):
    source = torch.Generator().manual_seed(0)
    hidden = scale * torch.randn(count, WIDTH, generator=source, dtype=torch.float64)
    weight = torch.randn(vocab, WIDTH, generator=source, dtype=torch.float64)
    targets = torch.randint(0, vocab, (count,), generator=source)
    targets[::5] = -100
    return hidden.to(dtype), weight.to(dtype), targets


def split(comm, weight):
    table = VocabularyTable(len(weight), WIDTH, comm)
    rows, padding = vocabulary_rows(len(weight), comm.world, comm.rank)
    local = F.pad(weight[rows.start : rows.stop], (0, 0, 0, padding), value=0.0)
    table.weight = torch.nn.Parameter(local)
    return table


def whole(tables):
    return torch.cat([grad[: len(rows)] for rows, grad in tables])


def run(world, hidden, weight, targets, *, sp=False, factor=1.0):
    def rank(comm):
        table = split(comm, weight)
        x = hidden.clone().requires_grad_()
        entered = gather_tokens(local_rows(x, comm), comm, len(x)) if sp else copy_to(x, comm)
        loss = split_loss_sum(entered, table, targets)
        (loss * factor).backward()
        with torch.no_grad():
            again = split_loss_sum(hidden, table, targets)
        assert again.item() == pytest.approx(loss.item(), rel=1e-6)
        assert not table.weight.grad[len(table.rows) :].any()
        return loss.detach(), x.grad, (table.rows, table.weight.grad)

    results = run_ranks(world, rank)
    grads = [grad for _, grad, _ in results]
    hidden_grad = sum(grads) if sp else grads[0]
    return [loss for loss, _, _ in results], hidden_grad, whole([r[2] for r in results])


def reference(hidden, weight, targets, factor=1.0):
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = token_loss_sum(x, w, targets)
    (loss * factor).backward()
    return loss.detach(), x.grad, w.grad


@pytest.fixture(params=[(2**24, 2**18), (7 * 7, 7 * 3)], ids=["whole", "chunks"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", request.param[0])
    monkeypatch.setattr(module, "_EXACT_ELEMENTS", request.param[1])


@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sp"])
@pytest.mark.parametrize(("world", "vocab"), [(2, 12), (2, 13), (4, 13), (4, 9), (4, 2)])
def test_loss_equals_the_unsplit_one(chunks, world, vocab, sp):
    hidden, weight, targets = data(vocab)
    losses, *result = run(world, hidden, weight, targets, sp=sp, factor=0.7)
    loss, *expected = reference(hidden, weight, targets, 0.7)
    assert all(torch.equal(other, losses[0]) for other in losses)
    assert losses[0].item() == pytest.approx(loss.item(), rel=1e-12)
    for a, b in zip(result, expected, strict=True):
        assert ((a - b).norm() / b.norm()).item() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_of_ten_thousand_are_safe(chunks, dtype):
    hidden, weight, targets = data(13, dtype=dtype)
    hidden = hidden / (hidden @ weight.T).abs().max() * 1e4
    losses, *result = run(2, hidden, weight, targets)
    loss, *expected = reference(hidden.double(), weight.double(), targets)
    near = 1e-10 if dtype == torch.float64 else 1e-4
    assert losses[0].item() == pytest.approx(loss.item(), rel=near)
    for a, b in zip(result, expected, strict=True):
        assert torch.isfinite(a).all() and ((a - b).norm() / b.norm()).item() < near


def test_bf16_is_near_and_the_weight_keeps_its_dtype():
    hidden, weight, targets = data(13, dtype=torch.float32)
    losses, grad_hidden, grad_weight = run(2, hidden.bfloat16(), weight, targets)
    loss, *expected = reference(hidden, weight, targets)
    assert losses[0].dtype == torch.float32
    assert losses[0].item() == pytest.approx(loss.item(), rel=0.01)
    assert (grad_hidden.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32)
    for a, b in zip((grad_hidden, grad_weight), expected, strict=True):
        assert ((a - b).norm() / b.norm()).item() < 0.02


def test_nothing_counts():
    hidden, weight, targets = data(13)
    losses, *result = run(2, hidden, weight, torch.full_like(targets, -100))
    assert losses[0].item() == 0
    assert not any(grad.any() for grad in result)


def test_three_numbers_a_token_travel_and_no_logits():
    hidden, weight, targets = data(200)

    def rank(comm):
        split_loss_sum(hidden, split(comm, weight), targets)
        return comm.meter.totals()

    for totals in run_ranks(2, rank):
        sent = sum(v for k, v in totals.items() if "wire_bytes" in k)
        assert sent == 3 * len(targets) * 8 * 2 * (2 - 1) / 2


@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sp"])
@pytest.mark.parametrize(("world", "vocab"), [(2, 13), (4, 13), (4, 2)])
def test_embedding_equals_the_unsplit_one(world, vocab, sp):
    _, weight, _ = data(vocab)
    source = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, vocab, (10,), generator=source)
    grad = torch.randn(10, WIDTH, generator=source, dtype=torch.float64)

    def rank(comm):
        table = split(comm, weight)
        out = table.look_up(tokens, sp=sp)
        out.backward(local_rows(grad, comm) if sp else grad)
        return out.detach(), (table.rows, table.weight.grad)

    results = run_ranks(world, rank)
    outs = [out for out, _ in results]
    expected = weight.clone().requires_grad_()
    F.embedding(tokens, expected).backward(grad)
    if sp:
        assert torch.equal(torch.cat(outs)[:10], weight[tokens])
    else:
        assert all(torch.equal(out, weight[tokens]) for out in outs)
    assert torch.allclose(whole([part for _, part in results]), expected.grad, rtol=1e-14)


def test_rows_beyond_the_vocabulary_are_told():
    shards = [vocabulary_rows(9, 4, shard) for shard in range(4)]
    assert shards == [(range(3), 0), (range(3, 6), 0), (range(6, 9), 0), (range(9, 9), 3)]
    assert vocabulary_rows(8, 2, 1) == (range(4, 8), 0)
