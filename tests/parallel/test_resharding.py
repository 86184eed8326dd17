"""Experts that change owners: equal to one process, their optimizer's state with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import SeededWeights, assemble, same_as_one, tokens
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import ConfigError, PlanError
from shoal.core.meter import Meter
from shoal.core.parts import table
from shoal.ir.hooks import TrainStep
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.expert import resharding
from shoal.parallel.expert.resharding import TAG, ReshardedLayer, Resharding, move
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.plan.placement import PLACERS
from shoal.plan.placement.owners import in_order, only_owners
from shoal.train.reshard import switch_engine

MOE: dict[str, Any] = {"family": "mixtral", "num_experts": 8, "top_k": 2, "num_layers": 2}
GRID = {"dp": 2, "ep": 2}


@dataclass(frozen=True)
class Shuffled:
    """Owners and copies by chance, the same on all ranks and others in every step."""

    every: int = 1
    even: bool = True
    copies: float = 0.3
    slots: int = 2
    rematerialize: str = "off"

    def estimate(self, work, machine):
        return PLACERS.build("owners").estimate(work, machine)

    def owners(self, expected_E, devices, now_E=None):
        old = in_order(len(expected_E), devices) if now_E is None else now_E
        if not self.even:
            return np.zeros_like(old)
        return np.random.default_rng(old.tolist()).permutation(old)

    def place(self, expected_E, owner_E, devices, budget=None):
        source = np.random.default_rng([7, *expected_E.astype(np.int64).tolist()])
        some = source.random((len(expected_E), devices.count)) < self.copies
        return some | only_owners(owner_E, devices)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setitem(PLACERS._own, "shuffled", f"{__name__}:Shuffled")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _compared(split, placer="shuffled", steps=4, **extra):
    model = {**MOE, **extra.pop("model", {})}
    given = job({**split, "placer": placer}, **{"global_batch": 4, "microbatch": 1, **extra})
    return same_as_one(given, config(**model), steps=steps)


def test_owners_by_chance_are_one_process():
    result = _compared(GRID)
    assert result.same, str(result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "placer", "extra"),
    [
        ({"dp": 4, "ep": 2}, "shuffled", {"shard": "zero1"}),
        ({"dp": 4, "ep": 4}, {"name": "fssdp", "resharding_every": 1, "slack": 0.0}, {}),
        ({"dp": 2, "tp": 2, "sp": True, "ep": 4}, "shuffled", {"recompute": "full"}),
        ({"dp": 2, "cp": 2, "ep": 4}, "shuffled", {"shard": "zero1"}),
        ({"dp": 2, "pp": 2, "ep": 2}, "shuffled", {}),
    ],
)
def test_any_owners_are_one_process(split, placer, extra):
    result = _compared(split, placer, **extra)
    assert result.same, str(result)


def test_state_that_stays_behind_is_found(monkeypatch):
    """The oracle sees experts that move without their optimizer's state."""
    whole = resharding._of
    monkeypatch.setattr(resharding, "_of", lambda prefix, owned, state: whole(prefix, owned, {}))
    result = _compared(GRID)
    assert result.loss > 1e-9
    assert result.parameter > 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_every_expert_arrives_and_every_byte_is_counted(seed):
    source = np.random.default_rng(seed)
    tables = [source.permutation(np.arange(12) % 4) for _ in range(4)]
    layers = (tables[:2], tables[2:])

    def on(comm):
        results = []
        for old, new in layers:
            mine = torch.from_numpy(np.flatnonzero(old == comm.rank))
            weights = mine[:, None, None] * torch.ones(3, 2, 2, dtype=torch.float64)
            results.append(ReshardedLayer(old, new, [weights, mine[:, None] + torch.zeros(3, 5)]))
        sent = move(results, comm)
        for (_, new), layer in zip(layers, results, strict=True):
            has = torch.from_numpy(np.flatnonzero(new == comm.rank))
            for tensor in layer.tensors:
                assert (tensor.flatten(1) == has[:, None]).all()
        return sent

    meter = Meter()
    sent = run_ranks(4, on, meter=meter, ranks_per_node=2)
    moves = sum(int((old != new).sum()) for old, new in layers)
    wire = sum(size for name, size in meter.totals().items() if "wire_" in name and TAG in name)
    assert sum(sent) == wire == moves * (4 * 8 + 5 * 4)


def _train(comm, jobs, steps, weights):
    """Parameters after ``steps`` steps with each of some jobs, and what moved."""
    engine, moved, number = None, [], 0
    for now in jobs:
        if engine is None:
            schedule = check_split(now, weights.config.shape())
            engine = ParallelEngine(now, schedule, weights, comm, dtype=torch.float64)
            updater = table("optimizer").build(now.optimizer).build(engine.sharded.owned())
        else:
            engine, updater, _ = switch_engine(engine, updater, now, comm)
        for _ in range(steps):
            every = tokens(now, weights.config.vocab_size, number, documents=False)
            share = len(every.inputs) // engine.replicas
            own = slice(engine.replica * share, (engine.replica + 1) * share)
            rows = ReplicaSequences(every.inputs[own], every.targets[own], None, own.start, number)
            engine.backward(rows, now.microbatch, int((every.targets != -100).sum()))
            engine.finish()
            updater.step(1.0)
            places = {n: [id(t) for t in kept.values()] for n, kept in updater.state().items()}
            engine.publish(TrainStep(number, 10**6, state=updater.state))
            moved.append(next((h.last for h in engine.hooks if isinstance(h, Resharding)), None))
            after = {n: [id(t) for t in kept.values()] for n, kept in updater.state().items()}
            assert after == places
            number += 1
    shapes = {n: tuple(p.shape) for n, p in weights.model().named_parameters()}
    return assemble(engine.held(), shapes, comm, torch.float64), moved


OTHERS = (
    ({"dp": 4, "ep": 4, "placer": "shuffled"}, {"shard": "zero1"}),
    ({"dp": 4, "ep": 2}, {}),
    ({"dp": 2, "pp": 2, "ep": 2, "placer": "fssdp"}, {}),
    ({"dp": 4}, {"shard": "zero3"}),
)


@pytest.mark.parametrize("other", OTHERS[:1])
@pytest.mark.parametrize("after", [True, False], ids=["to", "from"])
def test_a_state_goes_to_other_owners_and_from_them(other, after):
    _goes(other, after)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "after"),
    [(OTHERS[1], True), (OTHERS[2], False), (OTHERS[3], True), (OTHERS[3], False)],
)
def test_a_state_goes_to_other_grids_and_from_them(other, after):
    _goes(other, after)


def _goes(other, after):
    small = {"global_batch": 4, "microbatch": 1, "optimizer": {"name": "adamw", "lr": 1e-3}}
    moving = job({"dp": 4, "ep": 4, "placer": "shuffled"}, **small)
    then = job(other[0], **{**small, **other[1]})
    weights = SeededWeights(config(**MOE), dtype=torch.float64)
    plain = job({"dp": 4}, **small)
    whole, _ = run_ranks(4, lambda comm: _train(comm, [plain], 4, weights))[0]
    jobs = [moving, then] if after else [then, moving]
    result, moved = run_ranks(4, lambda comm: _train(comm, jobs, 2, weights))[0]
    assert sum(one.experts for one in moved if one is not None)
    for name, one in whole.items():
        torch.testing.assert_close(result[name], one, rtol=1e-9, atol=1e-12)


def test_what_cannot_be():
    placers = table("placer")
    for every in (0, -1):
        with pytest.raises(ConfigError, match=r"resharding_every = .*1 or more"):
            placers.build({"name": "fssdp", "resharding_every": every})
    with pytest.raises(PlanError, match=r"owners of blocks.0.mlp.experts.*4 experts of every rank"):
        _compared(GRID, {"name": "shuffled", "even": False})
    lamb = job({**GRID, "placer": "fssdp"}, optimizer="lamb")
    with pytest.raises(PlanError, match=r"optimizer = 'lamb'.*resharding_every"):
        check_split(lamb, config(**MOE).shape())
    for saved in ({"dump": "deepspeed"}, {"memory": "copies"}):
        moving = job({**GRID, "placer": "fssdp"}, checkpoint=saved)
        with pytest.raises(PlanError, match=r"checkpoint.*where experts change owners.*null"):
            check_split(moving, config(**MOE).shape())
    check_split(
        job({**GRID, "placer": {"name": "fssdp", "resharding_every": None}}, optimizer="lamb"),
        config(**MOE).shape(),
    )
