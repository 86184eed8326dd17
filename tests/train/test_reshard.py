"""A run that goes over to another split goes on exactly where it was."""

from __future__ import annotations

import pytest
import torch
from numpy.testing import assert_allclose

from shoal.claims.lab.same_as_one import SeededWeights, assemble, tokens
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import RankError
from shoal.core.parts import table
from shoal.ir import TrainJob
from shoal.model.config import ModelConfig
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.train.reshard import EmptyWeights, ReshardedState, move, switch_engine

CONFIG = ModelConfig(
    family="llama",
    vocab_size=29,
    hidden=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_hidden=24,
    max_position=32,
)

TOPO3 = {"name": "topo3", "levels": [2, 2]}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def job(parallel, **extra):
    return TrainJob.model_validate(
        {
            "model": "shoal-0.3m",
            "seq_len": 8,
            "global_batch": 4,
            "microbatch": 2,
            "precision": "fp32",
            "parallel": parallel,
            "steps": 6,
            "optimizer": {"name": "adamw", "lr": 1e-3},
            **extra,
        }
    )


def train(comm, jobs, steps):
    """Losses of ``steps`` steps with each of some jobs, and the parameters at the end."""
    weights = SeededWeights(CONFIG, dtype=torch.float64)
    shapes = {n: tuple(weights.whole(n).shape) for n in EmptyWeights(CONFIG)._shapes}
    losses, number, engine = [], 0, None
    for now in jobs:
        if engine is None:
            schedule = check_split(now, CONFIG.shape())
            engine = ParallelEngine(now, schedule, weights, comm, dtype=torch.float64)
            updater = table("optimizer").build(now.optimizer).build(engine.sharded.owned())
        else:
            engine, updater, sent = switch_engine(engine, updater, now, comm)
            assert sent >= 0
        for _ in range(steps):
            every = tokens(now, CONFIG.vocab_size, number, documents=False)
            share = len(every.inputs) // engine.replicas
            own = slice(engine.replica * share, (engine.replica + 1) * share)
            rows = ReplicaSequences(every.inputs[own], every.targets[own], None, own.start, number)
            count = now.global_batch * now.seq_len
            loss = engine.backward(rows, now.microbatch, count)
            engine.finish()
            updater.step(1.0)
            engine.sharded.publish()
            comm.all_reduce(loss, tag="loss").wait()
            losses.append(float(loss) / count)
            number += 1
    return losses, assemble(engine.held(), shapes, comm, torch.float64)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (({"dp": 2}, {}), ({"pp": 2, "stages": [1, 3]}, {})),
        (({"pp": 2}, {}), ({"dp": 2}, {"shard": "zero1"})),
        (({"dp": 2}, {"shard": "zero3"}), ({"tp": 2}, {"recompute": "full"})),
        (({"tp": 2, "sp": True}, {}), ({"dp": 2}, {"shard": "zero2", "microbatch": 1})),
        (({"dp": 2, "pp": 2}, {"shard": "zero1"}), ({"tp": 2, "dp": 2}, {"shard": "zero3"})),
        (({"dp": 4}, {"shard": TOPO3, "microbatch": 1}), ({"dp": 2, "tp": 2}, {"shard": "zero1"})),
        (({"dp": 2, "tp": 2}, {"shard": "zero3"}), ({"dp": 4}, {"shard": TOPO3, "microbatch": 1})),
    ],
)
def test_losses_and_weights_are_those_of_a_run_that_never_switches(before, after):
    first, second = job(before[0], **before[1]), job(after[0], **after[1])
    world = first.parallel.world
    losses, parameters = run_ranks(world, lambda comm: train(comm, [first], 6))[0]
    result, moved = run_ranks(world, lambda comm: train(comm, [first, second], 3))[0]
    assert_allclose(result, losses, rtol=1e-9)
    for name, whole in parameters.items():
        assert_allclose(moved[name], whole, rtol=1e-9, atol=1e-12)


def test_there_and_back():
    jobs = [job({"dp": 2}), job({"pp": 2}), job({"dp": 2}, shard="zero3")]
    losses, _ = run_ranks(2, lambda comm: train(comm, [jobs[0]], 6))[0]
    result, _ = run_ranks(2, lambda comm: train(comm, jobs, 2))[0]
    assert_allclose(result, losses, rtol=1e-9)


def test_what_nobody_has_is_said():
    def on(comm):
        moved = ReshardedState({"weight": (4,)})
        moved.set_dtypes({"weight": "float32"})
        moved.tensor("weight", offset=(0,), shape=(4,))
        move(comm, {}, moved)

    with pytest.raises(RankError, match="no rank has weight"):
        run_ranks(2, on)
