"""DTensor.redistribute gives the same local tensors, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from placed_dtensor import from_torch, to_torch
from torch.distributed.tensor import Partial, Shard

from shoal.core.errors import PlanError
from shoal.ir.placement import parse_placement
from shoal.parallel.comm.processes import run_processes

RANKS = Path(__file__).parent / "ranks_dtensor.py"


@pytest.mark.multi
@pytest.mark.parametrize(("sizes", "shape"), [([2, 2], [5, 6])])
@pytest.mark.slow
def test_redistribute_gives_the_same_parts(sizes: list[int], shape: list[int]) -> None:
    target = f"{RANKS}:redistribute"
    assert run_processes(target, 4, {"sizes": sizes, "shape": shape}) == [[]] * 4


def test_torchs_placements_are_read() -> None:
    placement = parse_placement("S(1),B,P(max)")
    assert from_torch(to_torch(placement)) == placement
    assert from_torch([Shard(0), Partial("sum")]) == parse_placement("S(0),P")
    with pytest.raises(PlanError, match="redistribute it first"):
        from_torch([Partial("avg")])
