"""Jobs that say where lies what passes save: the same losses and parameters, to the bit."""

from __future__ import annotations

import pytest

from shoal.core.errors import PlanError
from shoal.core.parts import table
from shoal.ir import TrainJob

torch = pytest.importorskip("torch")

from shoal.claims.lab.same_as_one import SeededWeights, assemble, tokens  # noqa: E402
from shoal.claims.lab.thread_ranks import run_ranks  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.parallel.engine import ParallelEngine  # noqa: E402
from shoal.parallel.legal import check_split  # noqa: E402
from shoal.parallel.tensor.rows import ReplicaSequences  # noqa: E402

MODEL = ModelConfig(
    family="llama",
    vocab_size=300,
    hidden=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden=192,
    max_position=64,
)


def job(**changes):
    return TrainJob(
        **{
            "model": "shoal-0.3m",
            "seq_len": 32,
            "global_batch": 4,
            "microbatch": 1,
            "precision": "fp32",
            "steps": 3,
            **changes,
        }
    )


def run(wanted):
    return run_ranks(wanted.parallel.world, lambda comm: _rank(wanted, comm))[0]


def _rank(wanted, comm):
    weights = SeededWeights(MODEL, wanted.seed)
    engine = ParallelEngine(wanted, check_split(wanted, MODEL.shape()), weights, comm)
    updater = table("optimizer").build(wanted.optimizer).build(engine.sharded.owned())
    losses = []
    size = wanted.global_batch // engine.replicas
    part = slice(engine.replica * size, (engine.replica + 1) * size)
    for step in range(3):
        whole = tokens(wanted, MODEL.vocab_size, step, documents=False)
        rows = ReplicaSequences(whole.inputs[part], whole.targets[part], None, part.start, step)
        loss = engine.backward(rows, wanted.microbatch, int((whole.targets != -100).sum()))
        engine.finish()
        updater.step(1.0)
        engine.sharded.publish()
        comm.all_reduce(loss, tag="loss").wait()
        losses.append(float(loss))
    written = 0
    for hook in engine.hooks:
        written = hook.stats.offloaded
        assert hook.disk.stats.used == 0
        hook.close()
    shapes = {n: tuple(weights.whole(n).shape) for n in weights._shapes}
    return losses, assemble(engine.held(), shapes, comm, torch.float32), written


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"recompute": "full"}, marks=pytest.mark.slow),
        {"precision": "bf16"},
        {"parallel": {"dp": 2}, "shard": "zero3"},
        {"parallel": {"pp": 2}},
        pytest.param(
            {"parallel": {"pp": 2, "vpp": 2, "schedule": "interleaved"}}, marks=pytest.mark.slow
        ),
        pytest.param({"parallel": {"tp": 2}}, marks=pytest.mark.slow),
    ],
)
def test_a_job_is_the_same(changes, tmp_path):
    kept, expected, none = run(job(**changes))
    saved = {"name": "ssdtrain", "path": str(tmp_path), "min_bytes": 1024}
    losses, result, offloaded = run(job(activation=saved, **changes))
    assert losses == kept
    assert offloaded > none == 0
    for name, value in expected.items():
        assert torch.equal(value, result[name]), name
    assert list(tmp_path.iterdir()) == []


def test_compiled_code_keeps_what_it_saves():
    with pytest.raises(PlanError, match=r"activation = ssdtrain: expected keep with compile"):
        check_split(job(activation="ssdtrain", compile=True), MODEL.shape())
