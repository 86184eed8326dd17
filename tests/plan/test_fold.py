"""Grids of experts and of attention: all legal pairs, and what they send."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from shoal.core.errors import PlanError
from shoal.cost.arithmetic import expert_parameters, parameters
from shoal.cost.price.expert_hops import exchange, routed
from shoal.cost.price.experts import held_parameters
from shoal.cost.shapes import find
from shoal.cost.training.step import estimate
from shoal.ir import Parallel, TrainJob, Work
from shoal.machine.described import load
from shoal.plan.experts.fold import folds
from shoal.plan.experts.fold_picture import grids

MODEL = "Mixtral-8x7B-v0.1"


def _job(**parallel):
    return TrainJob(
        model=MODEL, seq_len=4096, global_batch=256, microbatch=1, shard="zero1", parallel=parallel
    )


def test_neighbours_keep_experts_inside_a_node():
    folded = Parallel(dp=16, tp=2, cp=2, ep=8, sp=True)
    near = exchange(folded.experts().groups("ep"), 2.0, 800.0, 8)
    assert (near.near, near.far) == (1400.0, 0.0)
    apart = folded.model_copy(update={"fold": False})
    far = exchange(apart.experts().groups("ep"), 2.0, 800.0, 8)
    # Every fourth rank: two of a group on a node of eight.
    assert (far.near, far.far) == (200.0, 1200.0)


def test_bytes_of_a_known_routing():
    counts = [[3, 0, 5, 1], [0, 0, 2, 2], [1, 1, 1, 1], [4, 0, 0, 0]]
    near, far = routed([(0, 1, 2, 3)], counts, 10.0, 2)
    # Rank by rank, what is not its own expert's: of its node, of the other.
    assert near == 10.0 * (0 + 0 + 1 + 0)
    assert far == 10.0 * ((5 + 1) + (2 + 2) + (1 + 1) + (4 + 0))


def test_memory_is_what_is_held():
    shape = find(MODEL)
    experts = expert_parameters(shape)
    assert experts > 0.9 * parameters(shape)
    held, rest = held_parameters(shape, Parallel(dp=8, tp=2, sp=True, ep=4, etp=2))
    assert held == experts / 8
    assert rest == (parameters(shape) - experts) / 2


def test_far_experts_cost_time():
    machine, shape = load("64xH100"), find(MODEL)
    split = {"dp": 16, "tp": 2, "cp": 2, "ep": 8, "sp": True}
    near = estimate(Work(job=_job(**split), shape=shape), machine)
    far = estimate(Work(job=_job(**split, fold=False), shape=shape), machine)
    assert far.step_s.value > 1.02 * near.step_s.value
    assert far.wire_bytes["node"] > near.wire_bytes["node"]


def test_the_best_pair_keeps_tokens_near():
    job = TrainJob(model=MODEL, seq_len=4096, global_batch=256)
    result = folds(job, load("64xH100"), inside=True)
    assert result[0].fits
    fastest = min(result, key=lambda one: one.estimate.step_s.value)
    assert fastest.parallel.fold
    assert fastest.far_bytes == 0.0
    assert any(not one.parallel.fold and one.far_bytes > 0 for one in result)
    fitting = [one.estimate.step_s.value for one in result if one.fits]
    assert fitting == sorted(fitting)


def test_what_cannot_be_folded_is_refused():
    with pytest.raises(PlanError, match="mixture of experts"):
        folds(TrainJob(model="Llama-3.1-8B"), load("8xH100"))
    with pytest.raises(PlanError, match="stages"):
        folds(TrainJob(model=MODEL, global_batch=1), load("8xH100"), pp=3)


def test_the_picture_has_every_rank_three_times():
    split = Parallel(dp=16, tp=2, cp=2, ep=8, sp=True)
    drawn = ElementTree.fromstring(grids(split, 8))
    ranks = [one for one in drawn.iter() if one.tag.endswith("rect")]
    assert len(ranks) == 3 * 64
    cut = ElementTree.fromstring(grids(Parallel(dp=16, tp=2, etp=2, ep=2, sp=True), 8))
    assert len([one for one in cut.iter() if one.tag.endswith("rect")]) == 2 * 32
