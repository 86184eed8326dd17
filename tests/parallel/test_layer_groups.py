"""Layers that run in different ways, and stages of any length, equal one process."""

from __future__ import annotations

import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.measure_passes import PlaceholderWeights
from shoal.claims.lab.same_as_one import same_as_one
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import ConfigError, PlanError
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split

SOME = [{"blocks": 3, "recompute": "full"}, {"blocks": 5, "recompute": "none"}]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("parallel", "extra"),
    [
        ({}, {"layers": SOME}),
        ({"dp": 2}, {"layers": SOME, "shard": "zero3", "dropout": 0.2}),
        ({"pp": 2, "stages": [3, 5]}, {"layers": SOME}),
        ({"pp": 4, "stages": [1, 4, 1, 2]}, {"recompute": "full"}),
        ({"pp": 2, "stages": [6, 2], "tp": 2, "sp": True}, {"layers": SOME, "dropout": 0.2}),
        ({"pp": 2, "stages": [5, 3], "dp": 2, "vocab": "pp"}, {"layers": SOME}),
        ({"pp": 2, "vpp": 2, "stages": [3, 1, 2, 2], "schedule": "vhalf"}, {}),
        ({"cp": 2, "dp": 2}, {"layers": SOME, "recompute": "full"}),
    ],
)
def test_equals_one_process(parallel, extra):
    result = same_as_one(job(parallel, **extra), config(), steps=2)
    assert result.same, str(result)


def kept_bytes(recompute, layers=()):
    """Bytes that autograd keeps of one forward pass."""
    request = job({"dp": 1}, recompute=recompute, layers=layers, microbatch=8)

    def on(comm):
        engine = ParallelEngine(
            request, check_split(request, config().shape()), PlaceholderWeights(config()), comm
        )
        tokens = torch.arange(128).view(8, 16) % 53
        kept = 0

        def pack(x):
            nonlocal kept
            kept += x.nbytes
            return x

        from shoal.parallel.tensor.rows import ReplicaSequences

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            mb = engine.microbatches(ReplicaSequences(tokens, tokens, None, 0, 0), 8)[0]
            engine.runtime.stages[0](None, mb, recompute=recompute == "full")
        return kept

    return run_ranks(1, on)[0]


@pytest.mark.slow
def test_only_the_named_blocks_are_computed_again():
    none, full = kept_bytes("none"), kept_bytes("full")
    some = kept_bytes("none", SOME)
    assert full < some < none
    assert some == pytest.approx(none - 3 / 8 * (none - full), rel=0.05)


@pytest.mark.parametrize(
    ("parallel", "extra", "named"),
    [
        ({}, {"layers": [{"blocks": 7}]}, "add up to the 8"),
        ({"pp": 2, "stages": [3, 4]}, {}, "add up to the 8"),
    ],
)
def test_what_cannot_run_is_refused(parallel, extra, named):
    with pytest.raises(PlanError, match=named):
        check_split(job(parallel, **extra), config().shape())


@pytest.mark.parametrize(
    ("parallel", "extra", "named"),
    [
        ({"pp": 2, "stages": [8]}, {}, "parallel.stages"),
        ({"dp": 2}, {"layers": [{"blocks": 8, "tp": 2}]}, "product is 2"),
        ({}, {"layers": [{"blocks": 8}], "recompute": "stage"}, "computed again as a whole"),
    ],
)
def test_groups_that_contradict_the_job_are_refused(parallel, extra, named):
    with pytest.raises((ConfigError, ValueError), match=named):
        job(parallel, **extra)
