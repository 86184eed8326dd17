"""Where drafter and target go: the best of all that fit, and what does not fit is named."""

from __future__ import annotations

import dataclasses

import pytest

from shoal.core.errors import PlanError
from shoal.plan.heterogeneous import DraftOption, Heterogeneous
from shoal.plan.trees.drafting import RowCosts

SHALLOW = DraftOption(layers=1, nbytes=100, level_s=0.1, right=((0.6, 0.2), (0.4, 0.1)))
DEEP = DraftOption(layers=3, nbytes=300, level_s=0.2, right=((0.8, 0.1), (0.7, 0.1), (0.6, 0.1)))
COSTS = RowCosts(rows=(1, 5, 33), seconds_of=(1.0, 1.2, 4.0))
CASE = Heterogeneous(
    verify=COSTS, hidden=8, itemsize=2, memory_cap=1000, link_s=0.001, link_bytes_per_s=1e6
)


def test_the_first_is_the_best_of_all():
    found = CASE.rank([SHALLOW, DEEP])
    rates = [one.tokens_per_s for one in found]
    assert rates == sorted(rates, reverse=True)
    best = found[0]
    assert best.layers == 3  # verifying is dear, and a deeper drafter pays
    assert best.tokens_per_s == pytest.approx(
        best.tokens / (best.draft_s + best.link_s + best.verify_s)
    )
    dear = dataclasses.replace(CASE, verify=RowCosts(rows=(1, 33), seconds_of=(1.0, 33.0)))
    assert dear.rank([SHALLOW, DEEP])[0].nodes < best.nodes


def test_guesses_that_were_drafted_ahead_and_are_right_take_what_verifying_did_not_hide():
    alone = CASE.rank([DEEP], (3,))[0]
    ahead = dataclasses.replace(CASE, overlap=True).rank([DEEP], (3,))[0]
    assert alone.draft_s == pytest.approx(3 * 0.2)
    right = 0.8 * 0.7 * 0.6 * 0.6  # a path of three, and the token behind it
    assert ahead.verify_s > 5 * 0.2
    assert ahead.draft_s == pytest.approx((1 - right) * 0.6)
    quick = dataclasses.replace(
        CASE, overlap=True, verify=RowCosts(rows=(1, 33), seconds_of=(0.7, 0.7))
    )
    assert quick.rank([DEEP], (3,))[0].draft_s == pytest.approx((1 - right) * 0.6 + right * 0.3)


def test_a_cap_leaves_out_what_does_not_fit():
    small = dataclasses.replace(CASE, memory_cap=200)
    assert {one.layers for one in small.rank([SHALLOW, DEEP])} == {1}
    with pytest.raises(PlanError, match=r"memory_cap = 50: the smallest drafter takes 100 bytes"):
        dataclasses.replace(CASE, memory_cap=50).rank([SHALLOW, DEEP])
    with pytest.raises(PlanError, match="at least one"):
        CASE.rank([])


def test_spare_memory_takes_layers_of_the_target():
    case = dataclasses.replace(CASE, num_layers=10, layer_bytes=150, layer_s=0.01)
    best = case.rank([SHALLOW, DEEP])[0]
    assert best.resident == (1000 - best.nbytes + best.resident * 150) // 150
    assert best.nbytes <= 1000
    plain = CASE.rank([SHALLOW, DEEP])[0]
    assert best.tokens_per_s > plain.tokens_per_s
    rows = case.table([SHALLOW, DEEP])
    assert {(row["layers"], row["resident"] > 0) for row in rows} == {
        (1, False), (1, True), (3, False), (3, True)
    }  # fmt: skip
    assert all(row["speedup"] > 1 for row in rows)
