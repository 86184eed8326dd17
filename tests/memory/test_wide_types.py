"""An engine in fp64 stays in fp64 with its state in tiers: the same steps as without, to 1e-12."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from offload_runs import config, job

from shoal.claims.lab.same_as_one import SeededWeights, tokens
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.parts import table
from shoal.memory.protocols import EarlyUpdater
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences

MODEL = config(num_layers=2)


def trained(place: Path, parallel: dict[str, int], **changes: Any) -> dict[str, torch.Tensor]:
    """What rank 0 holds after three steps in fp64."""
    wanted = job(parallel, grad_clip=0, **changes)

    def on(comm: Any) -> dict[str, torch.Tensor]:
        engine = ParallelEngine(
            wanted,
            check_split(wanted, MODEL.shape()),
            SeededWeights(MODEL, 0, torch.float64),
            comm,
            place=place,
            dtype=torch.float64,
        )
        optimizer = table("optimizer").build(wanted.optimizer)
        updater = engine.updater(optimizer)
        for step in range(3):
            drawn = tokens(wanted, MODEL.vocab_size, step, documents=False)
            rows = ReplicaSequences(drawn.inputs, drawn.targets, None, 0, step)
            if isinstance(updater, EarlyUpdater):
                updater.begin(1.0)
            engine.backward(rows, 2, int((drawn.targets != -100).sum()))
            engine.finish()
            engine.grad_norm()
            updater.step(1.0)
            engine.sharded.publish()
        held = {
            name: torch.cat([one.tensor.detach().reshape(-1) for one in boxes])
            for name, boxes in engine.held().items()
        }
        moments = {
            f"{name} {key}": value.clone()
            for name, entries in updater.state().items()
            for key, value in entries.items()
            if key != "step"
        }
        for hook in engine.hooks:
            hook.close()
        return held | moments

    return run_ranks(wanted.parallel.world, on)[0]


@pytest.fixture(scope="module")
def plain_of() -> dict[str, dict[str, torch.Tensor]]:
    """Split -> the same training without tiers, once for all of them."""
    return {}


@pytest.mark.parametrize(
    ("offload", "parallel"),
    [
        ({"name": "zero_infinity", "host_budget": "64MiB"}, {}),
        ({"name": "zero_infinity", "host_budget": "64MiB"}, {"tp": 2}),
        ({"name": "superpipeline", "k": 1, "k_prime": 1}, {}),
        ({"name": "superpipeline", "k": 1, "k_prime": 1}, {"tp": 2}),
        ({"name": "deep_optimizer_states", "stride": 0, "sub_group_numel": 10_000}, {}),
        ({"name": "deep_optimizer_states", "stride": 2, "sub_group_numel": 10_000}, {}),
        ({"name": "deep_optimizer_states", "stride": 0, "sub_group_numel": 10_000}, {"tp": 2}),
        pytest.param(
            {"name": "fuyou", "host_budget": "96MiB", "swap_capacity": "64MiB"},
            {},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda one: "-".join(map(str, one.values())) or "whole",
)
def test_fp64_is_fp64(
    offload: dict[str, Any],
    parallel: dict[str, int],
    tmp_path: Path,
    plain_of: dict[str, dict[str, torch.Tensor]],
) -> None:
    torch.set_num_threads(1)
    if str(parallel) not in plain_of:
        plain_of[str(parallel)] = trained(tmp_path / "plain", parallel)
    plain = plain_of[str(parallel)]
    result = trained(tmp_path / "tiers", parallel, offload=offload)
    assert result.keys() == plain.keys()
    for name, value in plain.items():
        assert result[name].dtype == torch.float64, name
        torch.testing.assert_close(
            result[name].reshape(-1), value.reshape(-1), rtol=1e-12, atol=1e-14
        )
