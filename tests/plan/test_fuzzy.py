"""Groups of a draft's layers: the search takes what pays, the model of many devices adds up."""

from __future__ import annotations

import pytest

from shoal.core.errors import ConfigError
from shoal.plan.trees.fuzzy import draft_step_s, even_groups, search, spans


def test_even_groups_leave_the_ends_alone():
    assert even_groups(4, 8) == (1, 4, 2, 1)
    assert even_groups(3, 8) == (1, 3, 3, 1)
    assert even_groups(1, 3) == (1, 1, 1)
    assert [len(one) for one in spans((1, 4, 2, 1), 8)] == [1, 4, 2, 1]


@pytest.mark.parametrize(("size", "layers"), [(0, 8), (7, 8), (2, 1), (2, 3)])
def test_groups_that_do_not_fit_are_named(size, layers):
    with pytest.raises(ConfigError, match=f"group = {size}"):
        even_groups(size, layers)


@pytest.mark.parametrize("groups", [(2, 5, 1), (1, 5, 1), (1, 0, 6, 1)])
def test_sizes_that_are_wrong_are_named(groups):
    with pytest.raises(ConfigError, match="group"):
        spans(groups, 8)


def test_search_enlarges_while_a_token_gets_cheaper():
    def cost(groups):
        # Each layer saves as much, and groups beyond two layers cost guesses.
        return 10 - 0.5 * sum(size - 1 for size in groups) + 2 * sum(size > 2 for size in groups)

    assert search(8, cost) == (1, 2, 2, 2, 1)
    assert search(8, lambda groups: float(len(groups))) == (1, 6, 1)
    assert search(8, lambda groups: -float(len(groups))) == (1,) * 8
    assert search(1, lambda groups: 1.0) == (1,)


def test_many_devices_gain_by_groups_and_one_does_not():
    same = {"attention_s": [1.0] * 8, "mlp_s": [1.0] * 8, "gather_s": 0.05, "exchange_s": 0.05}
    alone = draft_step_s((1,) * 8, **{**same, "exchange_s": 0.4}, devices=8)
    grouped = draft_step_s((1, 6, 1), **{**same, "exchange_s": 0.4}, devices=8)
    assert grouped < alone
    assert draft_step_s((1, 6, 1), **same, devices=1) == pytest.approx(16.0)
    assert draft_step_s((1,) * 8, **same, devices=1) == pytest.approx(16.0)
