"""Each diagnosis from gradients that are made to have its cause, and from none other."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from shoal.claims.check.compare import Array
from shoal.claims.check.diagnose import ModuleOutput, StepEvidence, diagnose
from shoal.claims.check.protocols import Finding

AXES = {"dp": 2, "tp": 2}
PLACES = [{"dp": d, "tp": t} for d in (0, 1) for t in (0, 1)]
ORDER = ("embedding.weight", "norm.weight", "up.weight", "down.bias")
random = np.random.default_rng(0)
PARTS = [{name: random.normal(size=5) for name in ORDER} for _ in range(2)]


def whole(weights: Sequence[float] = (0.5, 0.5)) -> dict[str, Array]:
    return {n: sum(w * part[n] for w, part in zip(weights, PARTS, strict=True)) for n in ORDER}


def case(found: Sequence[dict[str, Array]], **more: object) -> StepEvidence:
    """Evidence with these gradients of the four ranks; the others are right."""
    expected = more.pop("expected", whole())
    names = [name for name in ORDER if any(name in view for view in found)]
    made = StepEvidence(
        axes=AXES,
        coordinates=PLACES,
        order=ORDER,
        expected=expected,  # type: ignore[arg-type]
        observed=found,
        differing=names,
        solo=[PARTS[place["dp"]] for place in PLACES],
    )
    return replace(made, **more)  # type: ignore[arg-type]


def only(evidence: StepEvidence) -> Finding:
    result = diagnose(evidence)
    assert len(result) == 1, result
    return result[0]


def test_missing_reduction_of_a_norm() -> None:
    # Each rank of tp has some of the tokens; the halves add up to the whole.
    right, half = whole()["norm.weight"], random.normal(size=5)
    views = [{"norm.weight": half if p["tp"] == 0 else right - half} for p in PLACES]
    finding = only(case(views))
    assert finding.kind == "missing_reduction" and finding.names == ("norm.weight",)
    assert "missing reduction over tp" in finding.text and "their sum" in finding.text


def test_no_reduction_over_dp() -> None:
    views = [{"norm.weight": PARTS[p["dp"]]["norm.weight"]} for p in PLACES]
    finding = only(case(views))
    assert finding.kind == "missing_reduction" and "their mean over dp" in finding.text
    finding = only(case([PARTS[p["dp"]] for p in PLACES], expected=whole((0.3, 0.7))))
    assert finding.kind == "missing_reduction" and "not reduced over dp" in finding.text


@pytest.mark.parametrize(
    ("factor", "kind", "words"),
    [
        (2.0, "not_averaged", "dp or tp"),
        (4.0, "not_averaged", "dp and tp"),
        (0.5, "mean_instead_of_sum", "a mean instead of a sum"),
        (3.0, "factor", "no number of ranks"),
    ],
)
def test_one_factor_everywhere(factor: float, kind: str, words: str) -> None:
    views = [{name: factor * x for name, x in whole().items()} for _ in PLACES]
    finding = only(case(views))
    assert finding.kind == kind and words in finding.text


def test_bias_whose_gradient_is_added_twice() -> None:
    views = [{"down.bias": 2 * whole()["down.bias"]} for _ in PLACES]
    finding = only(case(views))
    assert finding.kind == "added_times" and finding.names == ("down.bias",)
    assert "summed 2 times, once by every rank of dp or tp" in finding.text
    views = [{"down.bias": whole()["down.bias"] / 2} for _ in PLACES]
    assert only(case(views)).kind == "divided"


def test_bias_that_every_rank_adds() -> None:
    one, bias = random.normal(size=(3, 2, 5)), random.normal(size=5)
    output = ModuleOutput("down", one, one + bias, {"down.bias": bias})
    views = [{name: random.normal(size=5) for name in ORDER} for _ in PLACES]
    finding = only(case(views, output=output, loss_differs=True))
    assert finding.kind == "bias_added_times" and finding.names == ("down.bias",)
    assert "added 2 times, once by every rank of tp" in finding.text
    lost = replace(output, split=one - bias)
    assert "not added" in only(case(views, output=lost, loss_differs=True)).text
    # A row-parallel layer returns a part; the ranks' parts add up to one bias too many.
    part = replace(output, split=random.normal(size=one.shape), total=one + bias)
    assert only(case(views, output=part, loss_differs=True)).kind == "bias_added_times"
    unclear = replace(part, total=None)
    assert only(case(views, output=unclear, loss_differs=True)).kind == "forward"
    twice = only(case(views, output=ModuleOutput("up", one, 2 * one), loss_differs=True))
    assert twice.kind == "forward" and twice.names == ("up.weight",)
    assert "the number of ranks of tp" in twice.text


def test_wrong_divisor() -> None:
    # Means of parts of 7 and 3 tokens, averaged as if they were of equal size.
    views = [whole() for _ in PLACES]
    finding = only(case(views, expected=whole((0.7, 0.3)), loss_differs=True))
    assert finding.kind == "wrong_divisor"
    assert "0.5, 0.5; in the whole batch they have 0.7, 0.3" in finding.text
    views = [whole((0.2, 0.8)) for _ in PLACES]
    assert only(case(views, expected=whole((0.7, 0.3)))).kind == "wrong_weights"


def test_gradient_lost_on_its_way_back() -> None:
    views = [{name: random.normal(size=5) for name in ORDER[:2]} for _ in PLACES]
    finding = only(case(views, solo=()))
    assert finding.kind == "backward" and finding.names == ("norm.weight",)
    assert "correct from up.weight on" in finding.text


def test_what_is_not_in_the_gradients() -> None:
    none = [dict[str, Array]() for _ in PLACES]
    assert only(case(none, others=frozenset({"parameter"}))).kind == "optimizer"
    assert only(case(none, others=frozenset({"buffer"}))).kind == "buffer"
    assert only(case(none, others=frozenset({"start"}))).kind == "start"
    loss = only(case(none, loss_differs=True, loss=(4.0, 2.0)))
    assert loss.kind == "loss" and "--loss sum" in loss.text
    views = [{name: random.normal(size=5) for name in ORDER} for _ in PLACES]
    assert only(case(views, forward_equal=True, loss_differs=True)).kind == "parts"
    bad = [{"norm.weight": np.full(5, np.nan)} for _ in PLACES]
    assert only(case(bad)).kind == "not_finite"


def test_what_no_rule_explains_is_not_explained() -> None:
    views = [{name: random.normal(size=5) for name in ORDER} for _ in PLACES]
    assert diagnose(case(views)) == []
