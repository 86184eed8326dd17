"""The listed splits on four real processes that talk over Gloo."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from parallel_splits import AXES, FOUR, pairs

from shoal.parallel.comm.processes import run_processes


@pytest.mark.slow
@pytest.mark.multi
def test_listed_splits_on_real_ranks(capsys):
    target = f"{Path(__file__).with_name('ranks_same_as_one.py')}:every_split"
    ranks = run_processes(target, 4, timeout_s=240)
    assert [row["same"] for row in ranks[0]] == [True] * len(FOUR), ranks[0]
    assert all(len(rows) == len(FOUR) for rows in ranks)
    covered = pairs([parallel for parallel, _ in FOUR])
    wanted = list(itertools.combinations(AXES, 2))
    with capsys.disabled():
        print(
            f"\npairs of axes above one: {len(covered)} of {len(wanted)} covered: "
            + ", ".join(f"{a} x {b}" for a, b in sorted(covered))
        )
    assert covered == set(wanted)


@pytest.mark.slow
@pytest.mark.multi
def test_tokens_reach_experts_by_node_on_real_ranks():
    target = f"{Path(__file__).with_name('ranks_same_as_one.py')}:experts_by_node"
    assert run_processes(target, 4, ranks_per_node=2, timeout_s=120) == [[]] * 4
