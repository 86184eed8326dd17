"""Blocks with degrees and a sharding of their own: equal to one process, and refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import SeededWeights, same_as_one, tokens
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import PlanError
from shoal.parallel.comm.processes import run_processes
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.pipeline.layered import GridChange, LayerGrid

APART = [{"blocks": 3, "dp": 2, "tp": 1}, {"blocks": 5}]


@pytest.mark.multi
@pytest.mark.slow
def test_four_real_ranks_equal_one_process():
    target = f"{Path(__file__).with_name('ranks_layers_apart.py')}:every_job"
    assert run_processes(target, 4, timeout_s=240) == [[]] * 4


@pytest.mark.parametrize(
    ("parallel", "extra"),
    [
        ({"tp": 2}, {"layers": APART}),
        ({"tp": 2, "vocab": "none"}, {"layers": APART, "dropout": 0.2}),
        ({"dp": 2}, {"layers": [{"blocks": 3}, {"blocks": 5, "dp": 1, "tp": 2}]}),
        ({"dp": 2}, {"layers": [{"blocks": 3, "shard": "zero2"}, {"blocks": 5}]}),
        ({"tp": 2, "pp": 2, "schedule": "zb_h1"}, {"layers": APART}),
    ],
)
def test_threads_equal_one_process(parallel, extra):
    result = same_as_one(job(parallel, **extra), config(), steps=2)
    assert result.same, str(result)


@pytest.mark.parametrize("sequences", [1, 3, 4])
@pytest.mark.parametrize("grids", [((4, 1), (2, 2)), ((2, 2), (1, 4)), ((1, 4), (4, 1))])
def test_a_change_and_the_change_back(grids, sequences):
    before, after = (LayerGrid(*grid) for grid in grids)
    whole = torch.arange(sequences * 3 * 2).view(sequences * 3, 2)

    def on(comm):
        change = GridChange(before, after, sequences, 3, comm)
        have, want = (grid.share(comm.rank, sequences) for grid in (before, after))
        mine = whole[3 * have.start : 3 * have.stop]
        there = change.move(mine)
        assert torch.equal(there, whole[3 * want.start : 3 * want.stop])
        assert torch.equal(change.back().move(there), mine)

    run_ranks(4, on)


def test_held_out_sequences_that_no_replica_can_share():
    """Evaluation scores any number of sequences, on all replicas alike."""
    request = job({"tp": 2}, layers=APART)
    weights = SeededWeights(config(), 0, torch.float64)
    rows = tokens(request, 53, 0, documents=False)
    inputs, targets = rows.inputs[:3], rows.targets[:3]
    wanted = float(weights.model().loss_sum(inputs, targets).detach())

    def on(comm):
        engine = ParallelEngine(
            request, check_split(request, config().shape()), weights, comm, dtype=torch.float64
        )
        assert engine.together
        loss = engine.loss_sum(inputs, targets)
        comm.all_reduce(loss, tag="loss").wait()
        return float(loss)

    assert run_ranks(2, on) == [pytest.approx(wanted, rel=1e-12)] * 2


@pytest.mark.parametrize(
    ("parallel", "extra", "named"),
    [
        ({"cp": 2}, {"layers": [{"blocks": 8, "dp": 2, "cp": 1}]}, "parallel.cp = 2: expected 1"),
        ({"dp": 2}, {"layers": [{"blocks": 8, "dp": 1, "cp": 2}]}, "layers.0.cp = 2: expected 1"),
        ({"tp": 2, "sp": True}, {"layers": APART}, "parallel.sp"),
        ({"tp": 2, "order": "pp-tp-cp-dp"}, {"layers": APART}, "parallel.order"),
        ({"tp": 2, "overlap": "tile"}, {"layers": APART}, "parallel.overlap"),
        ({"tp": 2}, {"layers": APART, "microbatch": 1}, "layers.0.dp = 2: expected a divisor"),
        (
            {"dp": 2},
            {"layers": [{"blocks": 8, "shard": {"name": "hybrid", "within": 2}}]},
            "replicated, zero1, zero2 or zero3",
        ),
        (
            {"tp": 2, "pp": 2, "schedule": "zb_h1"},
            {"layers": [{"blocks": 8, "dp": 2, "tp": 1, "shard": "zero3"}]},
            "splits_backward",
        ),
        ({"tp": 2, "pp": 2, "vocab": "pp"}, {"layers": APART}, "layers_apart"),
    ],
)
def test_what_cannot_run_is_refused(parallel, extra, named):
    with pytest.raises(PlanError, match=named):
        check_split(job(parallel, **extra), config().shape())


def test_a_mixture_is_refused():
    mixture = config(family="mixtral", num_experts=4, top_k=2)
    with pytest.raises(PlanError, match="one without experts"):
        check_split(job({"tp": 2}, layers=APART), mixture.shape())
