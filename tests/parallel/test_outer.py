"""Workers that agree once a round equal their reference simulation, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.outer_reference import simulate
from shoal.claims.lab.same_as_one import SeededWeights, _share, tokens
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import CheckpointError, ConfigError, PlanError, RankError
from shoal.core.meter import Meter
from shoal.core.parts import Choice, table
from shoal.ir import Parallel
from shoal.ir.hooks import TrainStep
from shoal.parallel.comm.ranks import ranks_of
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.outer.co2 import CO2
from shoal.parallel.outer.diloco import DiLoCo
from shoal.parallel.outer.local_sgd import LocalSGD

F64 = torch.float64

PARTS = [
    LocalSGD(tau=3),
    DiLoCo(tau=3),
    CO2(tau=3),
    CO2(tau=1, penalty="none", clip=None, outer_momentum=0.5),
    CO2(tau=4, penalty="const", clip=1e-3, outer_lr=0.7),
    CO2(tau=2, clip=1e-2),
]
HALVED = [CO2(tau=3, dtype="bf16"), LocalSGD(tau=2, dtype="bf16")]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start():
    source = torch.Generator().manual_seed(7)
    shapes = ((5, 3), (7,), (2, 2, 2))
    return [torch.randn(shape, generator=source, dtype=F64) for shape in shapes]


def adamw():
    """An inner step whose gradients depend on worker and step; each worker has its own state."""
    kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def inner(worker, step, parameters):
        source = torch.Generator().manual_seed(1000 * worker + step)
        state = kept.setdefault(
            worker, [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
        )
        for p, (first, second) in zip(parameters, state, strict=True):
            noise = torch.randn(p.shape, generator=source, dtype=F64)
            gradient = p + noise + 0.3 * worker
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
            p.sub_(1e-2 * first / (second.sqrt() + 1e-8))

    return inner


class Nothing(torch.nn.Module):
    """A model without running statistics."""


class Kept(dict[str, torch.Tensor]):
    """What rounds have saved."""

    names = dict.keys
    tensor = dict.__getitem__

    def shape(self, name):
        return tuple(self[name].shape)


def begun(part, owned, comm):
    """The rounds of ranks that each are a worker of their own."""
    return part.apply(Nothing(), owned, ranks_of(comm, Parallel(dp=comm.world), comm.world))


def run(part, workers, steps, *, meter=None, state=None, first=0, inner=adamw, stop=None):
    """Parameters at each round's start on every rank, and what each keeps at the end."""

    def on(comm):
        step_of = inner()
        parameters = [x.clone() for x in (start() if state is None else state[comm.rank][0])]
        owned = {str(n): p for n, p in enumerate(parameters)}
        rounds = begun(part, owned, comm)
        if state is not None:
            rounds.load(Kept(state[comm.rank][1]))
        result, heard = [[p.clone() for p in parameters]], []
        for step in range(first, steps):
            step_of(comm.rank, step, parameters)
            asks = stop == (comm.rank, step)
            rounds.after_update(TrainStep(step, steps, stop=asks, loss=float(comm.rank + step)))
            if rounds.settled:
                result.append([p.clone() for p in parameters])
            heard.append((step, rounds.loss, rounds.stop))
        return result, {n: t.clone() for n, t in rounds.state().items()}, heard

    return run_ranks(workers, on, meter=meter)


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y)
        for one, other in zip(a, b, strict=True)
        for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    ("part", "workers"),
    list(itertools.product(PARTS + HALVED, (1, 2, 3))),
    ids=lambda x: str(x)[:40],
)
def test_ranks_equal_the_simulation_bit_for_bit(part, workers):
    steps = 11  # the last round is short
    outcome = simulate(part, start(), adamw(), workers=workers, steps=steps)
    for result, _, _ in run(part, workers, steps):
        assert same(result, outcome)


@pytest.mark.parametrize("part", PARTS, ids=lambda x: str(x)[:40])
@pytest.mark.parametrize("workers", [2, 3])
def test_sharded_outer_state_changes_nothing(part, workers):
    import dataclasses

    cut = dataclasses.replace(part, sharded=True)
    plain, shared = run(part, workers, 11), run(cut, workers, 11)
    assert all(same(found, shared[0][0]) for found, _, _ in shared)
    for one, other in zip(plain[0][0], shared[0][0], strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)
    # All that was said is said of the same rounds.
    assert [(s, stop) for s, _, stop in plain[0][2]] == [(s, stop) for s, _, stop in shared[0][2]]


def test_a_round_of_one_step_is_delayed_sgd():
    part = CO2(tau=1, outer_momentum=0.0, clip=None, penalty="none")
    lr, steps, workers = 0.05, 9, 2

    def gradient(worker, step, p):
        source = torch.Generator().manual_seed(1000 * worker + step)
        return p + torch.randn(p.shape, generator=source, dtype=F64)

    def sgd():
        def inner(worker, step, parameters):
            for p in parameters:
                p.sub_(gradient(worker, step, p), alpha=lr)

        return inner

    result = run(part, workers, steps, inner=sgd)[0][0]
    # x_{t+1} = x_t - lr * mean gradient at x_{t-1}; the last one is applied as well.
    x, late = start(), None
    for step in range(steps):
        now = [sum(gradient(w, step, p) for w in range(workers)) / workers for p in x]
        if late is not None:
            x = [p - lr * g for p, g in zip(x, late, strict=True)]
        late = now
        if step + 1 < steps:
            for p, outcome in zip(x, result[step + 1], strict=True):
                torch.testing.assert_close(outcome, p, rtol=1e-12, atol=1e-13)
    for p, g, outcome in zip(x, late, result[-1], strict=True):
        torch.testing.assert_close(outcome, p - lr * g, rtol=1e-12, atol=1e-13)


def test_penalty_and_clip_do_something():
    fields = {
        str(part): run(part, 2, 12)[0][0][-1][0]
        for part in (
            CO2(tau=3),
            CO2(tau=3, penalty="none"),
            CO2(tau=3, penalty="const"),
            CO2(tau=3, clip=1e-3),
            CO2(tau=3, outer_momentum=0.0),
            LocalSGD(tau=3),
        )
    }
    for (a, x), (b, y) in itertools.combinations(fields.items(), 2):
        assert not torch.equal(x, y), (a, b)


def test_gap_is_one_where_nothing_moves_and_at_most_two_without_momentum():
    from shoal.parallel.outer.rule import Segments

    part = CO2(tau=1, outer_momentum=0.0, clip=None)
    like = torch.zeros(6, dtype=F64)
    rule = part.rule(like, Segments([4, 2], 0, 6, None))
    source = torch.Generator().manual_seed(0)
    first = torch.randn(6, generator=source, dtype=F64)
    assert torch.equal(rule.direction(first.clone()), first)  # nothing has moved yet
    for _ in range(20):
        mean = torch.randn(6, generator=source, dtype=F64) * 3
        penalty = mean / rule.direction(mean.clone())
        assert (penalty >= 1.0).all()
        assert (penalty <= 2.0).all()
        torch.testing.assert_close(penalty[:4], penalty[:1].expand(4))


def test_bytes_are_those_of_the_ring_once_a_round():
    meter = Meter()
    run(CO2(tau=4), 2, 12, meter=meter)
    sent = {k: v for k, v in meter.totals().items() if "outer" in k and "wire_bytes" in k}
    elements = sum(x.numel() for x in start()) + 2
    # Three rounds on two ranks: each sends half a tensor twice.
    assert sum(sent.values()) == 3 * 2 * elements * 8
    meter = Meter()
    run(CO2(tau=4, dtype="bf16"), 2, 12, meter=meter)
    sent = {k: v for k, v in meter.totals().items() if "outer" in k and "wire_bytes" in k}
    # What is told travels as it is.
    assert sum(sent.values()) == 3 * 2 * ((elements - 2) * 2 + 2 * 8)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("part", [LocalSGD, DiLoCo, CO2])
def test_what_is_kept_at_a_rounds_start_goes_on(part, sharded):
    goes_on(part(tau=3, sharded=sharded))


def test_what_travelled_in_half_the_bytes_goes_on():
    goes_on(CO2(tau=3, dtype="bf16"))


def goes_on(made):
    memory: dict[int, Any] = {}

    def inner():
        """State by worker that both halves of the run share."""
        return memory["step"]

    memory["step"] = adamw()
    whole = run(made, 2, 12, inner=inner)

    def two_parts(comm):
        step_of = adamw()
        parameters = start()
        rounds = begun(made, {str(n): p for n, p in enumerate(parameters)}, comm)
        for step in range(6):
            step_of(comm.rank, step, parameters)
            rounds.after_update(TrainStep(step, 99, stop=comm.rank == 0))
        kept = {n: t.clone() for n, t in rounds.state().items()}
        again = [p.clone() for p in parameters]
        rounds = begun(made, {str(n): p for n, p in enumerate(again)}, comm)
        rounds.load(Kept(kept))
        for step in range(6, 12):
            step_of(comm.rank, step, again)
            rounds.after_update(TrainStep(step, 12))
            assert not rounds.stop, "who has stopped and goes on is not stopped again"
        return again

    for rank, result in enumerate(run_ranks(2, two_parts)):
        assert same([result], [whole[rank][0][-1]])
    if isinstance(made, LocalSGD):
        return  # what is averaged at once leaves nothing behind
    with pytest.raises(CheckpointError, match="new run"):
        run_ranks(2, lambda comm: begun(made, {"a": start()[0]}, comm).load(Kept()))


def test_all_hear_of_losses_and_of_the_wish_to_stop():
    heard = run(LocalSGD(tau=2), 2, 8, stop=(1, 2))
    halved = run(LocalSGD(tau=2, dtype="bf16"), 2, 8, stop=(1, 2))
    assert halved[0][2] == heard[0][2]
    assert heard[0][2] == heard[1][2]
    assert [loss for _, loss, _ in heard[0][2]] == [None, 1.0, None, 3.0, None, 5.0, None, 7.0]
    assert [stop for _, _, stop in heard[0][2]][3]
    assert not any(stop for _, _, stop in heard[0][2][:3])
    late = run(CO2(tau=2), 2, 8, stop=(1, 2))[0][2]  # the news comes a round later
    assert [loss for _, loss, _ in late][:6] == [None, None, None, 1.0, None, 3.0]
    assert [stop for _, _, stop in late][3:6] == [False, False, True]


def test_a_rank_that_leaves_within_a_round_ends_the_run():
    def on(comm):
        parameters = start()
        rounds = begun(CO2(tau=2), {str(n): p for n, p in enumerate(parameters)}, comm)
        for step in range(6):
            if comm.rank == 1 and step == 3:
                raise RankError("gone")
            rounds.after_update(TrainStep(step, 99))

    with pytest.raises(RankError, match="rank 1: gone"):
        run_ranks(2, on)


# ------------------------------------------------------------------ in a training step


def train(now, comm, steps, model):
    """Losses and whole parameters at the end of steps that a rank makes as the trainer does."""
    engine = ParallelEngine(
        now, check_split(now, model.shape()), SeededWeights(model, 0, F64), comm, dtype=F64
    )
    owned = engine.sharded.owned()
    updater = torch.optim.AdamW(list(owned.values()), lr=1e-2)
    peers = engine.ranks.worker or comm
    for step in range(steps):
        every = tokens(now, model.vocab_size, step, documents=False)
        rows = _share(every, engine.replicas, engine.replica)
        count = (rows.targets != -100).sum().to(F64)
        if not engine.first_of_replica:
            count.zero_()
        peers.all_reduce(count, tag="count").wait()
        loss = engine.backward(rows, now.microbatch, float(count))
        engine.finish()
        norm = engine.grad_norm()
        engine.sharded.scale_gradients((now.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        updater.step()
        engine.publish(TrainStep(step, steps, loss=float(loss)))
    return {n: h[0].tensor.clone() for n, h in engine.held().items()}


def one_worker_after_the_other(now, part, workers, steps, model):
    """The same in one process: each worker's step is that of an engine of its own."""
    alone = now.model_copy(
        update={
            "parallel": Parallel(),
            "sync": Choice(name="every_step"),
            "global_batch": now.global_batch // workers,
        }
    )

    def on(comm):
        names = list(
            ParallelEngine(
                alone,
                check_split(alone, model.shape()),
                SeededWeights(model, 0, F64),
                comm,
                dtype=F64,
            ).sharded.owned()
        )
        engines, updaters = [], []
        for _ in range(workers):
            engine = ParallelEngine(
                alone,
                check_split(alone, model.shape()),
                SeededWeights(model, 0, F64),
                comm,
                dtype=F64,
            )
            engines.append(engine)
            updaters.append(torch.optim.AdamW(list(engine.sharded.owned().values()), lr=1e-2))

        def inner(worker, step, parameters):
            engine = engines[worker]
            with torch.no_grad():
                for mine, p in zip(engine.sharded.owned().values(), parameters, strict=True):
                    mine.copy_(p)
            rows = _share(tokens(now, model.vocab_size, step, documents=False), workers, worker)
            engine.backward(rows, now.microbatch, float((rows.targets != -100).sum()))
            engine.finish()
            norm = engine.grad_norm()
            engine.sharded.scale_gradients((now.grad_clip / (norm + 1e-6)).clamp(max=1.0))
            updaters[worker].step()
            with torch.no_grad():
                for mine, p in zip(engine.sharded.owned().values(), parameters, strict=True):
                    p.copy_(mine)

        start_at = [p.detach().clone() for p in engines[0].sharded.owned().values()]
        result = simulate(part, start_at, inner, workers=workers, steps=steps)
        return dict(zip(names, result[-1], strict=True))

    return run_ranks(1, on)[0]


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "co2"])
def test_training_equals_its_workers_one_after_the_other(name):
    model = config(num_layers=1)
    sync = {"name": name, "tau": 2}
    now = job({"dp": 2}, sync=sync, global_batch=4, microbatch=2)
    ranks = run_ranks(2, lambda comm: train(now, comm, 3, model))
    expected = one_worker_after_the_other(now, table("sync").build(now.sync), 2, 3, model)
    for rank in ranks:
        for key, value in expected.items():
            assert torch.equal(rank[key], value), key


@pytest.mark.parametrize(
    ("split", "extra"),
    [
        ({"dp": 4}, {"shard": "zero1"}),
        ({"dp": 4}, {}),
        pytest.param({"dp": 4, "tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "pp": 2}, {"shard": "zero1"}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "cp": 2}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_worker_of_several_ranks_is_the_worker_of_one(split, extra):
    """Two workers of two replicas equal two workers of one replica with the same rows."""
    model = config(num_layers=2)
    sync = {"name": "co2", "tau": 2, "penalty": "none"}
    many = job(split, sync={**sync, "within": 2}, **extra)
    few = job({"dp": 2}, sync=sync)
    ranks = run_ranks(many.parallel.world, lambda comm: train(many, comm, 5, model))[0]
    expected = run_ranks(2, lambda comm: train(few, comm, 5, model))[0]
    for key, value in expected.items():
        if key in ranks and ranks[key].shape == value.shape:
            torch.testing.assert_close(ranks[key], value, rtol=1e-8, atol=1e-10)


def test_groups_of_workers():
    def on(comm):
        ranks = ranks_of(comm, Parallel(dp=4, tp=2), 2)
        return ranks.data.ranks, ranks.worker.ranks, ranks.outer.ranks, ranks.model.ranks

    ranks = run_ranks(8, on)
    assert ranks[0] == ((0, 2), (0, 1, 2, 3), (0, 4), (0, 1))
    assert ranks[7] == ((5, 7), (4, 5, 6, 7), (3, 7), (6, 7))


# ------------------------------------------------------------------ bad input, estimates


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "co2", "tau": 0}, "tau = 0: expected at least 1"),
        ({"name": "co2", "within": 0}, "within = 0: expected at least 1"),
        ({"name": "co2", "clip": 0.0}, "clip = 0.0: expected above 0"),
        ({"name": "co2", "outer_momentum": 1.0}, r"outer_momentum = 1.0: expected in \[0, 1\)"),
        ({"name": "diloco", "outer_lr": 0.0}, "above 0"),
        ({"name": "co2", "dtype": "bf16", "sharded": True}, "fp32 with sharded"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        table("sync").build(options)


@pytest.mark.parametrize(
    "changes",
    [
        {"shard": "zero2"},
        {"shard": "zero3"},
        {"shard": "hybrid"},
        {"offload": "zero_infinity"},
        {"replan": {"enabled": True}},
        {"checkpoint": {"memory": "copies"}},
        {"checkpoint": {"dump": "deepspeed"}},
        {"sync": {"name": "co2", "within": 3}},
    ],
    ids=str,
)
def test_what_workers_cannot_do_names_what_would(changes):
    now = job({"dp": 2}, **{"sync": "co2", **changes})
    with pytest.raises((PlanError, ConfigError), match=r"every_step|divisor of parallel.dp = 2"):
        check_split(now, config().shape())
    if "sync" not in changes:
        check_split(job({"dp": 2}, sync="co2"), config().shape())


def test_running_statistics_are_refused():
    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)

    def on(comm):
        model = Normed()
        LocalSGD(tau=2).apply(model, dict(model.named_parameters()), comm)

    with pytest.raises(ConfigError, match=r"running statistic norm\.running_mean"):
        run_ranks(2, on)


def test_auto_must_have_been_planned():
    with pytest.raises(ConfigError, match="tau = auto"):
        run_ranks(1, lambda comm: CO2().apply(Nothing(), {"a": start()[0]}, comm))


def priced(sync, bandwidth, **changes):
    from shoal.cost.shapes import find
    from shoal.cost.training.step import estimate
    from shoal.ir import Device, Link, Machine, MemoryTier, Work

    machine = Machine(
        name="two hosts",
        nodes=2,
        device=Device(
            name="core",
            kind="cpu",
            num_cores=1,
            peak_flops={"fp32": 1e11},
            matmul_flops={"fp32": 5e10},
            memory=(MemoryTier(name="dram", capacity_bytes=2**34, read_bandwidth=2e10),),
        ),
        links=(Link(scope="node", bandwidth=bandwidth, latency_s=1e-4),),
    )
    now = job({"dp": 2}, sync=sync, seq_len=64, **changes)
    work = Work(shape=find("shoal-0.3m"), job=now)
    part = table("sync").build(now.sync)
    return estimate(work, machine), part.steps(work, machine), part.estimate(work, machine)


def test_estimates_share_out_the_average_over_a_round():
    summed, _, _ = priced("every_step", 1e6)
    late, _, own = priced({"name": "co2", "tau": 8}, 1e6)
    waits, _, blocking = priced({"name": "local_sgd", "tau": 8}, 1e6)
    assert late.wire_bytes["node"] == pytest.approx(summed.wire_bytes["node"] / 8, rel=0.01)
    assert waits.wire_bytes == late.wire_bytes
    assert summed.step_s.value > waits.step_s.value > late.step_s.value
    assert own.terms_s["collective"] < blocking.terms_s["collective"]
    assert late.memory_bytes["optimizer"] > waits.memory_bytes["optimizer"]
    assert waits.memory_bytes["optimizer"] > summed.memory_bytes["optimizer"]
    cut, _, _ = priced({"name": "co2", "tau": 8, "sharded": True}, 1e6)
    assert cut.memory_bytes["optimizer"] <= late.memory_bytes["optimizer"]
    half, _, _ = priced({"name": "co2", "tau": 8, "dtype": "bf16"}, 1e6)
    assert half.wire_bytes["node"] == late.wire_bytes["node"] / 2
    assert half.memory_bytes["optimizer"] > late.memory_bytes["optimizer"]
    # Two ranks that are one worker average with nobody.
    one, _, _ = priced({"name": "co2", "tau": 8, "within": 2}, 1e6)
    assert one.wire_bytes == summed.wire_bytes


def test_auto_takes_the_fewest_steps_that_hide_the_average():
    for bandwidth in (1e5, 3e6, 1e7, 1e9):
        _, tau, auto = priced("co2", bandwidth)
        assert 1 <= tau <= 48
        if tau < 48:
            assert auto.terms_s["collective"] == 0.0
        if tau > 1:
            _, _, shorter = priced({"name": "co2", "tau": tau - 1}, bandwidth)
            assert shorter.terms_s["collective"] > 0.0
    assert priced("co2", 1e5)[1] == 48
    assert priced("co2", 1e12)[1] == 1
