"""Where drafter and target go: the best of all that fit, and what does not fit is named."""

from __future__ import annotations

import dataclasses

import pytest

from shoal.core.errors import ConfigError, PlanError
from shoal.plan.serving.heterogeneous import DraftOption, Heterogeneous
from shoal.plan.trees.drafting import RowCosts

SHALLOW = DraftOption(layers=1, nbytes=100, level_s=0.1, right=((0.6, 0.2), (0.4, 0.1)))
DEEP = DraftOption(layers=3, nbytes=300, level_s=0.2, right=((0.8, 0.1), (0.7, 0.1), (0.6, 0.1)))
COSTS = RowCosts(rows=(1, 5, 33), seconds_of=(1.0, 1.2, 4.0))
CASE = Heterogeneous(
    verify=COSTS, hidden=8, itemsize=2, memory_cap=1000, link_s=0.001, link_bytes_per_s=1e6
)


def test_the_first_is_the_best_of_all():
    result = CASE.rank([SHALLOW, DEEP])
    rates = [one.tokens_per_s for one in result]
    assert rates == sorted(rates, reverse=True)
    best = result[0]
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


LAYERED = dataclasses.replace(
    CASE,
    num_layers=10,
    layer_bytes=150,
    layer=RowCosts(rows=(1, 33), seconds_of=(0.01, 0.03)),
    head_s=0.2,
)


def test_spare_memory_takes_layers_of_the_target():
    best = LAYERED.rank([SHALLOW, DEEP])[0]
    assert best.target_layers == (1000 - best.nbytes + best.target_layers * 150) // 150
    assert best.nbytes <= 1000
    plain = CASE.rank([SHALLOW, DEEP])[0]
    assert best.tokens_per_s > plain.tokens_per_s
    rows = LAYERED.table([SHALLOW, DEEP])
    assert {(row["layers"], row["target_layers"] > 0) for row in rows} == {
        (1, False), (1, True), (3, False), (3, True)
    }  # fmt: skip
    assert len(rows) == 4
    assert all(row["speedup"] > 1 for row in rows)
    roomy = dataclasses.replace(LAYERED, memory_cap=10**6)
    assert roomy.rank([SHALLOW])[0].target_layers == 9  # the host keeps the last


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layer_s", [0.001, 0.05, 0.5])
def test_the_best_of_all_is_found_by_trying_all(layer_s, overlap):
    layer = RowCosts(rows=(1, 33), seconds_of=(layer_s, 2 * layer_s))
    case = dataclasses.replace(LAYERED, layer=layer, overlap=overlap, link_s=0.02)
    result = case.rank([SHALLOW, DEEP])
    tried = {}
    for option in (SHALLOW, DEEP):
        for one in CASE.rank([option]):  # of which tokens, and s of guesses without overlap
            for count in range(10):
                if option.nbytes + 150 * count > 1000:
                    continue
                whole, rows = COSTS.seconds(1 + one.nodes), 1 + one.nodes
                host = whole if not count else 0.2 + (whole - 0.2) * (10 - count) / 10
                depth = round(one.draft_s / option.level_s)
                draft = one.draft_s
                if overlap:
                    best = [shares[0] for shares in option.right]
                    right = best[min(depth, len(best) - 1)]
                    for share in best[:depth]:
                        right *= share
                    left = min(draft, max(0.0, draft + 2 * option.level_s - host))
                    draft = right * left + (1 - right) * draft
                messages = 5 if count else 3
                crossed = 60 + 5 * one.nodes + one.tokens * (4 + 16)
                if count:
                    crossed += 40 + rows * (13 + 16)
                link = 0.02 * messages + crossed / 1e6
                seconds = draft + host + count * layer.seconds(rows) + link
                tried[option.layers, one.nodes, count] = one.tokens / seconds
    assert {(one.layers, one.nodes, one.target_layers) for one in result} == set(tried)
    for one in result:
        rate = tried[one.layers, one.nodes, one.target_layers]
        assert one.tokens_per_s == pytest.approx(rate)
    assert result[0].tokens_per_s == pytest.approx(max(tried.values()))
    assert (result[0].target_layers > 0) == (layer_s < 0.1)


def test_layers_without_a_size_are_refused():
    with pytest.raises(ConfigError, match="layer_bytes = 0"):
        dataclasses.replace(LAYERED, layer_bytes=0)
