"""A vocabulary split over the ranks of a pipeline equals the unsplit head."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import DataError, PlanError
from shoal.core.meter import Meter
from shoal.ir.schedule import Op, Schedule
from shoal.model.config import ModelConfig
from shoal.parallel.vocab.passes import VocabShard, padded_vocab, shard_rows
from shoal.plan.schedules import SCHEDULES
from shoal.plan.schedules.vocab import with_vocabulary


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(vocab=11, *, tied=False):
    return ModelConfig(
        vocab_size=vocab, hidden=6, num_layers=4, num_heads=2, num_kv_heads=2, head_dim=2,
        ffn_hidden=8, tied=tied,
    )  # fmt: skip


def any_order(ranks, microbatches, barriers, seed, place=None):
    """A schedule in which ranks take whatever comes next, at random, micro-batches in order."""
    place = place or tuple(range(ranks))
    empty = Schedule("any", ((),) * ranks, place, microbatches, vocab_barriers=barriers)
    left = set(empty.expected())
    programs = [[] for _ in range(ranks)]
    done = set()
    dice = random.Random(seed)
    while left:
        ready = [
            op
            for op in sorted(left)
            if all(b in done for b in empty.before(op))
            and (op.mb == 0 or op._replace(mb=op.mb - 1) in done)
        ]
        op = dice.choice(ready)
        left.remove(op)
        done.add(op)
        programs[empty.rank_of(op)].append(op)
    result = Schedule("any", tuple(map(tuple, programs)), place, microbatches, {}, barriers)
    result.validate()
    return result


def fill(shard, full, output):
    rows = slice(shard.rows.start, shard.rows.stop)
    with torch.no_grad():
        shard.embed.weight.copy_(full[rows])
        if shard.output is not None:
            shard.output.weight.copy_(output[rows])


def scales(stages, dtype):
    """What each stage does here: it multiplies by these."""
    return [torch.linspace(0.5 + s, 1.5, 6, dtype=dtype) for s in range(stages)]


def run_passes(comm, schedule, cfg, full, output, batches, factor):
    """A runtime of the smallest kind, in which a stage multiplies by a constant."""
    dtype = full.dtype
    shard = VocabShard(cfg, comm, schedule, dtype=dtype).to(dtype)
    fill(shard, full, output)
    scale = scales(schedule.stages, dtype)
    x, dx, sends, loss, most = {}, {}, [], 0.0, 0

    def hand(store, op, stage, value, tag):
        target = schedule.place[stage]
        if target == comm.rank:
            store[stage, op.mb] = value
        else:
            sends.append((value, comm.send(value, target, tag=f"{tag}{stage}")))

    def take(store, op, source, tag):
        if schedule.place[source] == comm.rank:
            return store.pop((op.stage, op.mb))
        out = torch.empty(batches[op.mb][0].numel(), 6, dtype=dtype)
        comm.receive(out, schedule.place[source], tag=f"{tag}{op.stage}").wait()
        return out

    final = schedule.stages - 1
    for op in schedule.ops[comm.rank]:
        tokens, targets = batches[op.mb]
        if op.kind == "EF":
            shard.ef(op.mb, tokens)
        elif op.kind == "F":
            value = shard.take_embedded(op.mb) if op.stage == 0 else take(x, op, op.stage - 1, "f")
            value = value * scale[op.stage]
            if op.stage == final:
                shard.give_hidden(op.mb, value, targets)
            else:
                hand(x, op, op.stage + 1, value, "f")
        elif op.kind == "S":
            shard.s(op.mb, targets, factor)
        elif op.kind == "T":
            shard.t(op.mb)
        elif op.kind in ("B", "I"):
            if op.stage == final:
                part, value = shard.take_gradient(op.mb)
                loss += part
            else:
                value = take(dx, op, op.stage + 1, "b")
            value = value * scale[op.stage]
            if op.stage:
                hand(dx, op, op.stage - 1, value, "b")
            else:
                shard.give_gradient(op.mb, value)
        elif op.kind == "EB":
            shard.eb(op.mb)
        most = max(most, sum(map(len, shard._sent.values())))
    for _, pending in sends:
        pending.wait()
    shard.finish()
    return loss, {name: p.grad for name, p in shard.named_parameters()}, most


def reference(full, output, tied, stages, batches, factor):
    full = full.clone().requires_grad_(True)
    output = full if tied else output.clone().requires_grad_(True)
    loss = torch.zeros((), dtype=full.dtype)
    for tokens, targets in batches:
        x = F.embedding(tokens.reshape(-1), full)
        for scale in scales(stages, full.dtype):
            x = x * scale
        loss = loss + F.cross_entropy(
            x @ output.T, targets.reshape(-1), reduction="sum", ignore_index=-100
        )
    (loss * factor).backward()
    grads = {"embed.weight": full.grad}
    if not tied:
        grads["output.weight"] = output.grad
    return loss.detach(), grads


def problem(vocab, microbatches, *, size=1.0, seed=0, dtype=torch.float64):
    dice = torch.Generator().manual_seed(seed)
    full = torch.randn(vocab, 6, generator=dice, dtype=torch.float64)
    output = size * torch.randn(vocab, 6, generator=dice, dtype=torch.float64)
    batches = []
    for mb in range(microbatches):
        tokens = torch.randint(vocab, (2, 5 + mb % 2), generator=dice)
        targets = torch.randint(vocab, (2, 5 + mb % 2), generator=dice)
        targets[torch.rand(targets.shape, generator=dice) < 0.2] = -100
        batches.append((tokens, targets))
    return full.to(dtype), output.to(dtype), batches


def compare(world, schedule, cfg, full, output, batches, tolerance=1e-10):
    factor = 1 / 17
    got = run_ranks(
        world, lambda comm: run_passes(comm, schedule, cfg, full, output, batches, factor)
    )
    loss, grads = reference(full, output, cfg.tied, schedule.stages, batches, factor)
    last = schedule.place[-1]
    torch.testing.assert_close(got[last][0], loss, rtol=tolerance, atol=tolerance)
    for name, grad in grads.items():
        joined = torch.cat([part[1][name] for part in got])
        torch.testing.assert_close(joined, grad, rtol=tolerance, atol=tolerance)
    return got


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_loss_and_gradients_equal_the_unsplit_head(world, barriers, tied):
    for vocab, seed in ((11, 0), (24, 1), (3, 2)):  # not divisible; divisible; empty shards
        full, output, batches = problem(vocab, 2, seed=seed)
        schedule = any_order(world, 2, barriers, seed)
        compare(world, schedule, config(vocab, tied=tied), full, output, batches)


@pytest.mark.parametrize("barriers", [1, 2])
def test_any_valid_order_of_passes_ends_and_is_right(barriers):
    full, output, batches = problem(11, 5)
    for seed in range(12):
        world = 2 + seed % 3
        # Two stages a rank, there and back, every other time.
        place = None if seed % 2 else (*range(world), *reversed(range(world)))
        schedule = any_order(world, 5, barriers, seed, place)
        compare(world, schedule, config(), full, output, batches)


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_schedules_that_a_job_can_choose(name, barriers):
    part = SCHEDULES.build(name)
    chunks = part.chunks or 2
    schedule = with_vocabulary(part.build(3, 6, chunks), barriers)
    full, output, batches = problem(11, 6)
    compare(3, schedule, config(), full, output, batches)


@pytest.mark.parametrize("barriers", [1, 2])
def test_targets_on_one_rank_large_logits_and_nothing_counted(barriers):
    full, output, batches = problem(12, 3, size=3e3)
    tokens = batches[0][0]
    batches[0] = (tokens, torch.full_like(tokens, 11))
    batches[1] = (tokens, torch.zeros_like(tokens))
    batches[2] = (tokens, torch.full_like(tokens, -100))
    assert float((full @ output.T).abs().max()) > 1e4
    schedule = any_order(3, 3, barriers, 3)
    got = compare(3, schedule, config(12), full, output, batches)
    assert all(torch.isfinite(g).all() for _, grads, _ in got for g in grads.values())


@pytest.mark.parametrize("barriers", [1, 2])
def test_bf16_computes_in_bf16_with_exact_softmax(barriers):
    full, output, batches = problem(12, 2, dtype=torch.float32)
    schedule = any_order(2, 2, barriers, 0)

    def rank(comm):
        shard = VocabShard(config(12), comm, schedule, dtype=torch.bfloat16)
        fill(shard, full, output)
        x = torch.randn(10, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
        targets = batches[0][1]
        if comm.rank == 1:
            shard.give_hidden(0, x, targets)
        shard.s(0, targets, 0.25)
        if barriers == 2:
            shard.t(0)
        result = shard.take_gradient(0) if comm.rank == 1 else None
        if barriers == 1:
            shard.t(0)
        shard.finish()
        return result, shard.output.weight.grad, x

    (_, low, x), ((loss, dx), high, _) = run_ranks(2, rank)
    x = x.float().requires_grad_(True)
    weight = output.clone().requires_grad_(True)
    whole = F.cross_entropy(
        x @ weight.bfloat16().float().T, batches[0][1].reshape(-1), reduction="sum"
    )
    (0.25 * whole).backward()
    assert loss.dtype == torch.float32 and dx.dtype == torch.bfloat16
    torch.testing.assert_close(loss, whole.detach(), rtol=2e-2, atol=0.0)
    torch.testing.assert_close(dx.float(), x.grad, rtol=3e-2, atol=2e-2)
    torch.testing.assert_close(torch.cat([low, high]), weight.grad, rtol=3e-2, atol=2e-2)


@pytest.mark.parametrize("barriers", [1, 2])
def test_bytes_are_those_of_the_closed_form(barriers):
    vocab, p, width, b = 11, 3, 6, 8
    full, output, batches = problem(vocab, 2)
    schedule = any_order(p, 2, barriers, 5)
    with Meter() as meter:
        run_ranks(
            p,
            lambda comm: run_passes(comm, schedule, config(vocab), full, output, batches, 1.0),
            meter=meter,
        )
        totals = meter.totals()
    sent = defaultdict(float)
    for name, value in totals.items():
        for tag in ("embed", "hidden", "stats", "dx", "dembed"):
            if f"tag=vocab_{tag}," in name or f"tag=vocab_{tag}}}" in name:
                sent[tag] += value
    want = defaultdict(float)
    first, last = shard_rows(vocab, p, 0), shard_rows(vocab, p, p - 1)
    for tokens, targets in batches:
        n, o = tokens.numel(), sum(t in first for t in tokens.reshape(-1).tolist())
        counted = [t for t in targets.reshape(-1).tolist() if t != -100]
        c, t = len(counted), sum(i in last for i in counted)
        want["embed"] += (n - o) * width * b
        want["hidden"] += (p - 1) * c * width * b
        want["stats"] += 2 * p * (p - 1) * c * 8 + (c - t) * 8
        want["dx"] += (p - 1) * c * width * b
        if barriers == 1:
            want["dx"] += (c - t) * width * b
        want["dembed"] += (n - o) * width * b
    assert sent == want


def test_nothing_is_held_longer_than_it_takes():
    """Messages that have surely arrived are let go; their number does not grow with the step."""

    def most(microbatches):
        ops = []
        for rank in range(2):
            order = [Op("EF", rank, 0)]
            for mb in range(microbatches):
                order.append(Op("F", rank, mb))
                if mb + 1 < microbatches:
                    order.append(Op("EF", rank, mb + 1))
                order += [Op(k, rank, mb) for k in ("S", "T", "B", "EB")]
            ops.append(tuple(order))
        schedule = Schedule("plain", tuple(ops), (0, 1), microbatches, {}, 2)
        schedule.validate()
        full, output, batches = problem(11, microbatches)
        got = compare(2, schedule, config(), full, output, batches)
        return [part[2] for part in got]

    assert most(12) == most(4)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("barriers", [1, 2])
def test_no_rank_ever_has_all_logits(barriers):
    vocab, tokens = 240, 22
    full, output, batches = problem(vocab, 2)
    schedule = any_order(3, 2, barriers, 1)

    def rank(comm):
        with Largest() as largest:
            run_passes(comm, schedule, config(vocab), full, output, batches, 1.0)
        return largest.elements

    # The rank's own columns of the logits, or the whole test matrix that rows are taken from.
    assert max(run_ranks(3, rank)) <= max(tokens * vocab // 3, vocab * 6)


def test_loss_without_gradients():
    full, output, batches = problem(11, 3)
    schedule = any_order(3, 1, 1, 0)

    def rank(comm):
        shard = VocabShard(config(), comm, schedule, dtype=torch.float64).double()
        fill(shard, full, output)
        total = 0.0
        for tokens, targets in batches:
            x = shard.forward_embed(tokens)
            if comm.rank == 0:
                comm.send(x, 2, tag="x").wait()
            if comm.rank == 2:
                x = full.new_empty(tokens.numel(), 6)
                comm.receive(x, 0, tag="x").wait()
            total += shard.forward_loss(x if comm.rank == 2 else None, targets)
        shard.finish()
        assert shard.embed.weight.grad is None and not shard._sent
        return total

    with torch.no_grad():
        want = sum(
            F.cross_entropy(
                full[tokens.reshape(-1)] @ output.T, targets.reshape(-1), reduction="sum"
            )
            for tokens, targets in batches
        )
    low, middle, high = run_ranks(3, rank)
    assert low == middle == 0
    torch.testing.assert_close(high, want, rtol=1e-12, atol=1e-12)


def test_rows_of_the_ranks_are_the_vocabulary():
    assert padded_vocab(11, 3) == 12 and padded_vocab(50257, 4) == 50264
    for vocab in (3, 11, 12, 50257):
        for ranks in (1, 2, 3, 4):
            rows = [shard_rows(vocab, ranks, r) for r in range(ranks)]
            assert rows[0].start == 0 and rows[-1].stop == vocab
            assert all(a.stop == b.start for a, b in pairwise(rows))
            assert max(map(len, rows)) == min(padded_vocab(vocab, ranks) // ranks, vocab)


def test_bad_input():
    full, output, batches = problem(11, 1)
    tokens, targets = batches[0]
    schedule = any_order(2, 1, 1, 0)

    def call(action):
        def rank(comm):
            shard = VocabShard(config(), comm, schedule, dtype=torch.float64).double()
            fill(shard, full, output)
            action(shard, comm.rank)

        run_ranks(2, rank)

    x = torch.zeros(10, 6, dtype=torch.float64)
    wrong = targets.clone()
    wrong[0, 0] = 11
    with pytest.raises(DataError, match=r"target = 11: expected 0 to 10"):
        call(lambda shard, rank: shard.s(0, wrong, 1.0))
    with pytest.raises(DataError, match=r"token = -100: expected 0 to 10"):
        call(lambda shard, rank: shard.ef(0, torch.full_like(tokens, -100)))
    with pytest.raises(PlanError, match="expected 10, one for each target"):
        call(lambda shard, rank: shard.give_hidden(0, x[:3], targets))

    def score(shard, rank, factor):
        if rank:
            shard.give_hidden(0, x, targets)
        shard.s(0, targets, factor)

    def unfinished(shard, rank):
        score(shard, rank, 1.0)
        shard.finish()

    with pytest.raises(PlanError, match="micro-batches 0 are missing"):
        call(unfinished)

    def no_gradient(shard, rank):
        score(shard, rank, None)
        shard.t(0)

    with pytest.raises(PlanError, match="needs S with a factor"):
        call(no_gradient)

    plain = Schedule("plain", ((), ()), (0, 1), 0)
    with pytest.raises(PlanError, match=r"1 or 2; choose parallel\.vocab = pp"):
        run_ranks(2, lambda comm: VocabShard(config(), comm, plain))
    with pytest.raises(PlanError, match="expected 3, the ranks of the pipeline"):
        run_ranks(3, lambda comm: VocabShard(config(), comm, schedule))
    crossed = Schedule(
        "crossed",
        tuple(tuple(Op("EF", r, mb) for mb in order) for r, order in enumerate(((0, 1), (1, 0)))),
        (0, 1),
        2,
        {},
        1,
    )
    with pytest.raises(PlanError, match="different orders"):
        run_ranks(2, lambda comm: VocabShard(config(), comm, crossed))
    overtaken = ("S0", "S1"), ("F1", "F0", "S0", "S1")
    ops = tuple(
        tuple(Op(what[0], r, int(what[1])) for what in program)
        for r, program in enumerate(overtaken)
    )
    with pytest.raises(PlanError, match="different orders"):
        crossed = Schedule("overtaken", ops, (0, 1), 2, {}, 1)
        run_ranks(2, lambda comm: VocabShard(config(), comm, crossed))
