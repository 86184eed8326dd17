"""Routers of experts: capacity, gates and balance losses equal one process, whatever the split."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import SeededWeights, same_as_one, tokens
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import PlanError
from shoal.ir.hooks import TrainStep
from shoal.model.routing import StepRouting
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.expert.balance import Routers
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences

MOE: dict[str, Any] = {"family": "mixtral", "num_experts": 4, "top_k": 2, "num_layers": 2}

GATES: dict[str, dict[str, Any]] = {
    "softmax": {"capacity_factor": 1.0, "aux_loss": 0.5, "z_loss": 0.1},
    "sigmoid": {"gate": {"name": "sigmoid", "bias_rate": 0.05}, "capacity_factor": 1.25},
    "switch": {"gate": "switch", "capacity_factor": 1.25, "aux_loss": 0.5},
    "gshard": {"gate": "gshard", "capacity_factor": 1.0, "aux_loss": 0.5},
    "expert_choice": {"gate": "expert_choice", "z_loss": 0.1},
    "xmoe": {"gate": "xmoe", "aux_loss": 0.5, "z_loss": 0.1},
}

# Where a sequence's tokens are: on one rank, on the ranks of either axis, on those of both; with
# experts on a grid of their own, or sliced by tp.
SPREAD: tuple[dict[str, Any], ...] = (
    {"dp": 2, "ep": 2},
    {"cp": 2, "tp": 2, "sp": True, "ep": 2, "etp": 2},
    {"cp": 2, "tp": 2},
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def moe(top_k: int = 2, **routing: Any) -> dict[str, Any]:
    if routing.get("gate") == "switch":
        top_k = 1
    return {**MOE, "top_k": top_k, "architecture": {"moe": routing}}


def agrees(split: dict[str, Any], routing: dict[str, Any], **extra: Any) -> None:
    batch = {"global_batch": 8 if split.get("dp") == 8 else 4, "microbatch": 1, **extra}
    layers = {"num_layers": max(2, split.get("pp", 1))}
    result = same_as_one(job(split, **batch), config(**{**moe(**routing), **layers}), steps=2)
    assert result.same, str(result)


def grids(world: int) -> list[dict[str, Any]]:
    grids = []
    sizes = [n for n in (1, 2, 4, 8) if n <= world]
    for dp, tp, cp, pp in itertools.product(sizes, repeat=4):
        if dp * tp * cp * pp != world:
            continue
        for ep, etp in itertools.product(sizes, repeat=2):
            if ep * etp > 1 and (dp * tp * cp) % (ep * etp) == 0 and ep <= 4:
                degrees = {"dp": dp, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
                grids.append(degrees | ({"sp": True} if tp > 1 else {}))
    return grids


def name_of(split: dict[str, Any]) -> str:
    return "-".join(f"{name}{size}" for name, size in split.items() if size > 1)


DROPPING = {"capacity_factor": 1.0}


@pytest.mark.parametrize("split", grids(2)[::2], ids=name_of)
def test_dropping_among_whole_sequences(split):
    agrees(split, DROPPING)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["softmax", "switch"], ids=["top-2", "top-1"])
@pytest.mark.parametrize("split", grids(4)[::2], ids=name_of)
def test_dropping_on_grids_of_four_ranks(split, gate):
    # A single expert whose weight is made 1 teaches its router nothing: top-1 is the switch.
    agrees(split, {**DROPPING, "gate": gate})


@pytest.mark.slow
@pytest.mark.parametrize("split", grids(8)[3::14], ids=name_of)
def test_dropping_on_grids_of_eight_ranks(split):
    agrees(split, DROPPING)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPREAD, ids=name_of)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate_equals_one_process(gate, split):
    agrees(split, GATES[gate])


@pytest.mark.parametrize("gate", ["sigmoid", "gshard"])
def test_gates_over_two_ranks(gate):
    agrees({"cp": 2, "ep": 2}, GATES[gate])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "extra"),
    [
        ({"dp": 2, "pp": 2, "ep": 2, "schedule": "zb_h1"}, {"microbatch": 1}),
        ({"dp": 2, "ep": 2}, {"recompute": "full", "dropout": 0.2, "microbatch": 2}),
        ({"tp": 2, "sp": True, "ep": 2}, {"microbatch": 2}),
        ({"dp": 2}, {"shard": "zero1"}),
    ],
    ids=["zero bubble", "recomputed", "sequences split by tp", "zero1"],
)
def test_what_else_a_job_may_do(split, extra):
    agrees(split, {"capacity_factor": 1.0, "aux_loss": 0.5, "z_loss": 0.1}, **extra)
    agrees(split, GATES["sigmoid"], **extra)


class Crowded(SeededWeights):
    """Weights with which every token chooses expert 2, and no other."""

    def whole(self, name: str) -> torch.Tensor:
        result = super().whole(name)
        if name.endswith("router_bias"):
            result = torch.zeros_like(result)
            result[2] = 100.0
        return result


@pytest.mark.parametrize(("factor", "dropped"), [(None, 0.0), (1.0, 0.75)])
def test_a_router_that_sends_all_to_one_expert_runs_and_is_reported(factor, dropped):
    """The other three have no token at all; their ranks take part all the same."""
    routing = {"gate": "sigmoid", "top_k": 1, "capacity_factor": factor}
    model = config(**moe(**{k: v for k, v in routing.items() if v is not None}))
    weights = Crowded(model, 0, torch.float64)
    split = job({"dp": 2, "ep": 2}, global_batch=4, microbatch=1)
    whole = tokens(split, model.vocab_size, 0, documents=False)
    count = int((whole.targets != -100).sum())

    def on(comm: Any) -> tuple[float, Any, torch.Tensor]:
        engine = ParallelEngine(
            split, check_split(split, model.shape()), weights, comm, dtype=torch.float64
        )
        part = slice(2 * engine.replica, 2 * engine.replica + 2)
        rows = ReplicaSequences(
            whole.inputs[part], whole.targets[part], None, 2 * engine.replica, 0
        )
        loss = engine.backward(rows, 1, count)
        engine.finish()
        routers: Any = engine.hooks["routers"]
        balance = routers.balance
        engine.publish(TrainStep(0, 1))
        comm.all_reduce(loss, tag="loss").wait()
        return float(loss), balance, routers.kept["blocks.1.mlp.router_bias"].clone()

    one = weights.model()
    wanted = one.loss_sum(whole.inputs, whole.targets, routing=StepRouting(0, 0, 0, 4))
    alone = Routers(one, 2, 4, 4, None)
    alone.finish()
    for loss, balance, bias in run_ranks(2, on):
        assert loss == pytest.approx(float(wanted.detach()), rel=1e-12)
        assert balance == alone.balance
        assert (balance.imbalance, balance.dropped) == (4.0, dropped)
        assert bias.tolist() == pytest.approx([0.001, 0.001, 99.999, 0.001])


def test_capacity_of_a_rank_depends_on_the_split_and_runs():
    routing = {"capacity_factor": 0.5, "scope": "sub-sequence"}
    result = same_as_one(
        job({"cp": 2, "ep": 2}, global_batch=4, microbatch=1), config(**moe(**routing)), steps=1
    )
    assert not result.same
    assert result.loss < 0.05
    # Where a rank has what one process has, it drops the same.
    agrees({"pp": 2}, routing, global_batch=1)


@pytest.mark.parametrize(
    ("split", "extra", "routing", "told"),
    [
        ({"dp": 2}, {"shard": "zero3"}, {"gate": "sigmoid"}, "shard = zero3"),
        ({"dp": 2}, {"sync": {"name": "local_sgd", "tau": 2}}, {"gate": "sigmoid"}, "sync"),
        ({}, {"compile": True}, {"capacity_factor": 1.0}, "compile = True"),
        (
            {"pp": 4, "schedule": {"name": "skippipe", "keep": 3}},
            {"microbatch": 1},
            {"aux_loss": 0.1},
            "visit every layer",
        ),
    ],
)
def test_jobs_that_would_not_keep_the_balance_are_refused(split, extra, routing, told):
    with pytest.raises(PlanError, match=told):
        layers = {"num_layers": 4}
        model = config(**{**moe(**routing), **layers})
        check_split(job(split, global_batch=4, **extra), model.shape())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plain", "balanced"),
    [
        (
            {"gate": {"name": "sigmoid", "bias_rate": 0.0}},
            {"gate": {"name": "sigmoid", "bias_rate": 0.02}},
        ),
        ({}, {"aux_loss": 0.1}),
    ],
    ids=["bias", "loss"],
)
def test_loads_become_even(plain, balanced):
    """A crowded router, trained on with and without."""
    assert _worst(balanced) < 0.75 * _worst(plain)


def _worst(routing: dict[str, Any]) -> float:
    """Mean imbalance of the last steps of a short training whose routers begin crowded."""
    model = SeededWeights(config(**{**moe(**routing), "num_experts": 8}), 0).model()
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.router.weight.mul_(8.0)
            if hasattr(block.mlp, "router_bias"):
                block.mlp.router_bias.zero_()
    routers, of = Routers(model, 2, 8, 8, None), StepRouting(0, 0, 0, 8)
    updates = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    results = []
    for step in range(60):
        rows = tokens(job({}), model.config.vocab_size, step, documents=False)
        updates.zero_grad()
        loss = model.loss_sum(rows.inputs, rows.targets, routing=replace(of, step=step))
        (loss / int((rows.targets != -100).sum())).backward()
        updates.step()
        routers.finish()
        routers.published(TrainStep(step, 60))
        results.append(routers.balance.imbalance)
    return sum(results[-10:]) / 10
