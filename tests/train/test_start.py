"""What ranks dumped while they trained is their state, and a run goes on from it in any split."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from shoal.checkpoint.formats.deepspeed import DeepSpeedDumps
from shoal.checkpoint.formats.deepspeed_dump import dump
from shoal.checkpoint.formats.transfer import differences, open_any, transfer
from shoal.claims.lab.same_as_one import SeededWeights, assemble, tokens
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import CheckpointError, ShoalError
from shoal.core.parts import table
from shoal.ir import TrainJob
from shoal.model.config import ModelConfig
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.parallel.tensor.slices import whole_shapes
from shoal.train.run import execute
from shoal.train.start import begin_at, open_start, take_over
from shoal.train.state import fill

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
    tied=True,
)


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
            "microbatch": 1,
            "precision": "fp32",
            "parallel": parallel,
            "steps": 6,
            "optimizer": {"name": "adamw", "lr": 1e-3},
            **extra,
        }
    )


def train(comm, now, steps, *, first=0, start=None, root=None):
    """Losses, whole parameters and whole first moments; a dump at the end if asked."""
    engine = ParallelEngine(now, check_split(now, CONFIG.shape()), SeededWeights(CONFIG), comm)
    updater = table("optimizer").build(now.optimizer).build(engine.sharded.owned())
    if start is not None:
        fill(engine, updater, open_any(start))
    losses = []
    for number in range(first, first + steps):
        every = tokens(now, CONFIG.vocab_size, number, documents=False)
        share = len(every.inputs) // engine.replicas
        own = slice(engine.replica * share, (engine.replica + 1) * share)
        rows = ReplicaSequences(every.inputs[own], every.targets[own], None, own.start, number)
        loss = engine.backward(rows, now.microbatch, 32.0)
        engine.finish()
        updater.step(1.0)
        engine.sharded.publish()
        comm.all_reduce(loss, tag="loss").wait()
        losses.append(float(loss))
    if root is not None:
        meta = {"model": CONFIG.model_dump(mode="json"), "run": {"data": "x"}}
        dump(root, first + steps, engine, updater.state(), meta, comm.barrier, keep=2)
    shapes = whole_shapes(CONFIG)
    moments = engine.boxes({n: entries["exp_avg"] for n, entries in updater.state().items()})
    whole = [
        {name: value.float() for name, value in assemble(held, shapes, comm, torch.float64).items()}
        for held in (engine.held(), moments)
    ]
    return losses, *whole


LAYOUTS = [
    ({"dp": 4}, {"shard": "zero1"}),
    ({"dp": 4}, {}),
    ({"dp": 2, "tp": 2}, {}),
    ({"pp": 2, "tp": 2}, {}),
    ({"dp": 2, "pp": 2}, {"shard": "zero3"}),
    ({"dp": 2, "pp": 2}, {"shard": "zero2"}),
    ({"dp": 4}, {"shard": "hybrid"}),
    ({"dp": 4}, {"shard": {"name": "topo3", "levels": [2, 4]}}),
    ({"tp": 2, "sp": True}, {}),
    ({"pp": 2, "vocab": "pp"}, {}),
    ({"dp": 2, "cp": 2}, {"shard": "zero1"}),
]
QUICK = (3, 4)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=() if number in QUICK else pytest.mark.slow)
        for number, layout in enumerate(LAYOUTS)
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_dump_is_the_state_of_the_run(tmp_path, layout):
    now = job(layout[0], **layout[1])
    world, root = now.parallel.world, tmp_path / "dumps"
    losses, weights, moments = run_ranks(world, lambda comm: train(comm, now, 3, root=root))[0]
    result = open_any(root)
    for name in whole_shapes(CONFIG):
        assert torch.equal(result.tensor(f"model.{name}"), weights[name])
        assert torch.equal(result.tensor(f"optimizer.{name}.exp_avg"), moments[name])
    assert (result.step, len(losses)) == (3, 3)
    # The run that goes on in the same layout is the run that never stopped, bit for bit.
    never, whole, _ = run_ranks(world, lambda comm: train(comm, now, 6))[0]
    goes_on, again, _ = run_ranks(world, lambda comm: train(comm, now, 3, first=3, start=root))[0]
    assert losses + goes_on == never
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    alone = job({"dp": 1})
    other, _, _ = run_ranks(1, lambda comm: train(comm, alone, 3, first=3, start=root))[0]
    assert other == pytest.approx(goes_on, rel=1e-5)


def test_steps_that_are_no_longer_kept_go_with_what_was_made_of_them(tmp_path):
    def on(comm):
        for first in range(3):
            train(comm, job({"dp": 1}), 1, first=first, root=tmp_path)
            open_any(tmp_path)

    run_ranks(1, on)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step2",
        "global_step2.universal",
        "global_step3",
        "global_step3.universal",
        "latest",
    ]


def test_a_rank_that_cannot_write_leaves_the_old_step(tmp_path):
    run_ranks(1, lambda comm: train(comm, job({"dp": 1}), 1, root=tmp_path))
    (tmp_path / ".global_step2.tmp").write_text("in the way")

    def on(comm):
        return train(comm, job({"dp": 1}), 1, first=1, root=tmp_path)

    with pytest.raises(CheckpointError, match="global_step2: not dumped"):
        run_ranks(1, on)
    assert DeepSpeedDumps(tmp_path).meta["step"] == 1


@pytest.fixture
def place(tmp_path):
    run_ranks(1, lambda comm: train(comm, job({"dp": 1}), 2, root=tmp_path / "dumps"))
    return transfer(tmp_path / "dumps", tmp_path / "u", "universal")


def test_a_run_says_where_it_begins(tmp_path, place):
    root = tmp_path / "run"
    root.mkdir()
    assert open_start(root) is None
    begin_at(root, f"universal://{place}")
    assert json.loads((root / "start.json").read_text()) == {"from": f"universal:{place}"}
    result = open_start(root)
    assert result is not None
    loaded = []
    trainer = SimpleNamespace(load=loaded.append, pieces=dict)
    model = CONFIG.model_dump(mode="json")
    assert take_over(trainer, result, model, {"data": "x"}) == 2
    assert loaded == [result]
    with pytest.raises(CheckpointError, match=r"saved with run.data = 'x', and the run has 'y'"):
        take_over(trainer, result, model, {"data": "y"})
    with pytest.raises(CheckpointError, match=r"saved with model.hidden = 16"):
        take_over(trainer, result, {**model, "hidden": 8}, {"data": "x"})


def test_what_ranks_dumped_is_put_together_before_ranks_start(tmp_path):
    run_ranks(1, lambda comm: train(comm, job({"dp": 1}), 1, root=tmp_path / "dumps"))
    begin_at(tmp_path, str(tmp_path / "dumps"))
    made = tmp_path / "dumps" / "global_step1.universal"
    assert json.loads((tmp_path / "start.json").read_text()) == {"from": f"universal:{made}"}


def test_weights_alone_are_no_start(tmp_path, place):
    model = transfer(place, tmp_path / "hf", "huggingface")
    with pytest.raises(CheckpointError, match="give that directory as model"):
        begin_at(tmp_path, str(model))
    assert not (tmp_path / "start.json").exists()


@pytest.mark.slow
@pytest.mark.multi
def test_a_run_of_processes_goes_on_in_another_split(make_plan, tmp_path):
    """Two replicas with ZeRO 1, then two stages: the same losses, from the step of the dump."""
    kept = {"every": 3, "keep": 4, "dump": "deepspeed"}
    short = {"model": "shoal-0.3m", "steps": 6, "checkpoint": kept}
    first = make_plan(parallel={"dp": 2}, shard="zero1", **short)
    execute(first, tmp_path / "a")
    dumped = tmp_path / "a" / "dumps" / "global_step3"
    second = make_plan(parallel={"pp": 2}, **short)
    execute(second, tmp_path / "b", start=str(dumped))

    def losses(run):
        events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
        return {e["step"]: e["loss"] for e in events if e["kind"] == "step"}

    one, two = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert sorted(two) == [3, 4, 5]
    for step, loss in two.items():
        assert loss == pytest.approx(one[step], rel=1e-5)
    result = {d.name: d for d in differences(tmp_path / "a", tmp_path / "b")}
    assert result["optimizer.norm.weight.step"].kind == "equal"
    assert all(d.largest is not None and d.largest < 1e-4 for d in result.values())
    other = make_plan(parallel={"dp": 1}, **{**short, "seed": 3})
    with pytest.raises(ShoalError, match=r"saved with run.seed = 0, and the run has 3"):
        execute(other, tmp_path / "c", start=str(dumped))
