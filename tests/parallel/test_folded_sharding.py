"""Experts on a grid of their own under ZeRO stages 2 and 3: equal, counted, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_splits import config as eight
from parallel_splits import job

from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.store import Store
from shoal.claims.lab.same_as_one import SeededWeights, same_as_one, tokens
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import ConfigError, PlanError
from shoal.core.meter import Meter
from shoal.cost.arithmetic import embedding_parameters
from shoal.cost.price.experts import held_parameters
from shoal.cost.training.step import Pricer
from shoal.ir import Parallel, TrainJob, Work
from shoal.machine.described import load
from shoal.model.config import ModelConfig
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.shard.cost import sharding_estimate
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.plan.strategy.space import sharding_choices

LAYERS = 2


def config(**changes: Any) -> ModelConfig:
    """Rows of every matrix that four ranks divide."""
    moe = {"family": "mixtral", "num_experts": 4, "top_k": 2, "num_layers": LAYERS}
    return eight(**{**moe, "vocab_size": 56, **changes})


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shard", ["zero2", "zero3"])
@pytest.mark.parametrize(
    ("split", "extra"),
    [
        # Experts over two ranks and all else over four.
        ({"dp": 4, "ep": 2}, {"recompute": "full"}),
        # Nobody has the same experts: they are whole.
        pytest.param({"dp": 4, "ep": 4}, {}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "cp": 2, "ep": 2}, {}, marks=pytest.mark.slow),
        # More ranks share experts than share all else.
        pytest.param({"dp": 2, "tp": 4, "sp": True, "ep": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "pp": 2, "ep": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"dp": 8, "ep": 2, "etp": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "tp": 2, "sp": True, "ep": 4}, {}, marks=pytest.mark.slow),
    ],
    ids=["dp4-ep2", "whole", "cp", "tp4", "pp", "etp", "tp2-ep4"],
)
def test_same_as_one(split: dict[str, Any], extra: dict[str, Any], shard: str) -> None:
    one = job(split, shard=shard, microbatch=1, **extra)
    result = same_as_one(one, config(), steps=2)
    assert result.same, str(result)


def trained(one: TrainJob, hook: Any) -> list[Any]:
    """What the hook says of every rank after a step, and the bytes that each has sent."""
    weights = SeededWeights(config(), dtype=torch.float32)
    schedule = check_split(one, config().shape())

    def run(comm: Any) -> Any:
        comm.meter = comm.wire.meter = Meter()
        engine = ParallelEngine(one, schedule, weights, comm, dtype=torch.float32)
        owned = engine.sharded.owned()
        adam = torch.optim.AdamW(list(owned.values()))
        everything = tokens(one, config().vocab_size, 0, documents=False)
        share = len(everything.inputs) // engine.replicas
        mine = slice(engine.replica * share, (engine.replica + 1) * share)
        rows = ReplicaSequences(
            everything.inputs[mine], everything.targets[mine], None, mine.start, 0
        )
        engine.backward(rows, one.microbatch, 100.0)
        engine.finish()
        adam.step()
        engine.sharded.publish()
        return hook(engine, comm), comm.meter.totals()

    return run_ranks(one.parallel.world, run)


def sent(totals: dict[str, float]) -> float:
    """Bytes of parameters and gradients."""
    return sum(
        value for key, value in totals.items() if "tag=parameters" in key or "tag=gradients" in key
    )


@pytest.mark.parametrize("shard", ["zero2", "zero3"])
@pytest.mark.parametrize("ep", [2, 4])
def test_bytes_and_memory_are_those_of_the_estimate(shard: str, ep: int) -> None:
    one = job({"dp": 4, "ep": ep}, shard=shard, microbatch=1, recompute="full")
    machine = load("8xH100")
    work = Work(shape=config().shape(), job=one)
    passes = one.global_batch // 4
    times = 2.0 if shard == "zero2" else 1.0 + 2.0 * passes
    predicted = sharding_estimate(work, machine, sent_per_parameter_byte=times, messages=1)
    wanted = sum(predicted.wire_bytes.values())
    if shard == "zero3":
        # What is around the blocks is not computed again, and is gathered once a pass.
        around = embedding_parameters(work.shape) + config().hidden
        wanted -= passes * 4.0 * around * 3 / 4
    experts, rest = held_parameters(work.shape, one.parallel)
    mine = rest / 4 + experts / one.parallel.edp

    def held(engine: ParallelEngine, comm: Any) -> tuple[int, int]:
        owned = engine.sharded.owned()
        return sum(p.numel() for p in owned.values()), sum(p.grad is None for p in owned.values())

    for (elements, _), totals in trained(one, held):
        assert elements == mine
        assert sent(totals) == pytest.approx(wanted)
    memory = Pricer(machine).estimate(work).memory_bytes
    block = (rest + (experts if one.parallel.edp > 1 else 0.0)) / LAYERS
    if shard == "zero3":
        assert memory["weights"] == pytest.approx(4 * mine + 8 * block)
    assert memory["gradients"] == pytest.approx(4 * mine + 4 * block)
    assert memory["optimizer"] == pytest.approx(8 * mine)


@pytest.mark.slow
def test_what_one_grid_has_saved_another_loads(tmp_path: Path) -> None:
    before = job({"dp": 4, "ep": 2}, shard="zero3", microbatch=1)
    after = job({"dp": 2, "ep": 2}, shard="zero1", microbatch=1)
    store = Store(tmp_path / "checkpoints")

    def save(engine: ParallelEngine, comm: Any) -> Any:
        pieces = {
            f"model.{name}": [Piece(box.tensor, box.shape, box.offset) for box in boxes]
            for name, boxes in engine.held().items()
            if engine.writes(name)
        }
        store.save(1, pieces, {}, rank=comm.rank, world=comm.world, barrier=comm.barrier)
        return engine.held()

    result = trained(before, save)
    saved = Store(tmp_path / "checkpoints").open(1)
    for held, _ in result:
        for name, boxes in held.items():
            for box in boxes:
                size = tuple(box.tensor.shape)
                assert torch.equal(saved.tensor(f"model.{name}", box.offset, size), box.tensor)

    def filled(comm: Any) -> bool:
        schedule = check_split(after, config().shape())
        engine = ParallelEngine(after, schedule, Stored(config(), saved), comm, dtype=torch.float32)
        return all(
            torch.equal(
                box.tensor, saved.tensor(f"model.{name}", box.offset, tuple(box.tensor.shape))
            )
            for name, boxes in engine.held().items()
            for box in boxes
        )

    assert all(run_ranks(2, filled))


class Stored:
    """Weights that lie in a checkpoint."""

    def __init__(self, config: ModelConfig, saved: Any) -> None:
        self.config, self._saved = config, saved

    def whole(self, name: str) -> torch.Tensor:
        return self._saved.tensor(f"model.{name}")


@pytest.mark.parametrize(
    ("split", "extra", "told"),
    [
        ({"dp": 4, "ep": 2}, {"shard": "hybrid"}, "zero2 or zero3 with ep 2, whose tokens travel"),
        (
            {"dp": 4, "ep": 2},
            {"shard": "topo3"},
            r"zero2 or zero3 .*\(experts_apart excludes levels\)",
        ),
        (
            {"dp": 4, "ep": 2, "placer": "fssdp"},
            {"shard": "zero3"},
            "replicated or zero1 with placer fssdp",
        ),
        ({"tp": 4, "sp": True, "ep": 2}, {"shard": "zero2"}, r"dp \* cp = 1"),
        ({"dp": 2, "pp": 2, "ep": 2, "schedule": "zb_h1"}, {"shard": "zero2"}, "schedule zb_h1"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    split: dict[str, Any], extra: dict[str, Any], told: str
) -> None:
    with pytest.raises((ConfigError, PlanError), match=told):
        check_split(job(split, microbatch=1, **extra), config().shape())


def test_plans_try_them() -> None:
    machine = load("8xH100")
    names = {
        placer: {
            c.name
            for c in sharding_choices(
                TrainJob(model="Mixtral-8x7B-v0.1", steps=1, global_batch=8),
                Parallel(dp=8, ep=4, placer=placer),
                machine,
            )
        }
        for placer in ("owners", "fssdp")
    }
    assert names == {
        "owners": {"replicated", "zero1", "zero2", "zero3"},
        "fssdp": {"replicated", "zero1"},
    }
