"""Groups are made with barriers that grow as the job does."""

from __future__ import annotations

import math

import pytest

from shoal.claims.lab.bootstrap import BootstrapCost, Group, bootstrap, groups_of
from shoal.core.errors import ConfigError, RankError
from shoal.ir import Parallel


def counted(world: int, *, everyone: bool) -> BootstrapCost:
    groups = groups_of(Parallel(tp=4, pp=4, dp=world // 16))
    orders = [[g for g in groups if everyone or rank in g] for rank in range(world)]
    return bootstrap(world, orders, everyone=everyone)


def test_own_groups_cost_linearly_many_arrivals_and_all_groups_quadratically() -> None:
    small, large = counted(64, everyone=False), counted(256, everyone=False)
    assert math.log(large.arrivals / small.arrivals, 4) == pytest.approx(1.0, abs=0.02)
    small, large = counted(64, everyone=True), counted(256, everyone=True)
    assert math.log(large.arrivals / small.arrivals, 4) > 1.8


def test_each_group_is_made_by_its_members() -> None:
    groups: list[Group] = [(0, 1), (2, 3), (0, 2), (1, 3)]
    result = bootstrap(4, [[g for g in groups if rank in g] for rank in range(4)], everyone=False)
    assert result == BootstrapCost(groups=4, arrivals=8 + 4, operations=2 * 12)


def test_different_orders_are_a_deadlock_that_is_told() -> None:
    # 0 waits for 1 in (0, 1), 1 for 2 in (1, 2), 2 for 0 in (0, 2).
    orders: list[list[Group]] = [[(0, 1), (0, 2)], [(1, 2), (0, 1)], [(0, 2), (1, 2)]]
    with pytest.raises(RankError, match=r"different orders.*rank 0 for \(0, 1\)"):
        bootstrap(3, orders, everyone=False)
    with pytest.raises(ConfigError, match="orders = 1"):
        bootstrap(3, [[]], everyone=False)
