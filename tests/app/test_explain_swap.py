"""``shoal explain swap``: what it shows and refuses."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from shoal.app.commands.explain import app

TOLD = ["--forward", 1, "--backward", 2, "--again", 1, "--activations", "4GB", "--parameters", 1e8]


def swap(*words):
    return CliRunner().invoke(app, ["swap", *map(str, (*TOLD, *words))])


def test_a_curve_and_its_least():
    shown = swap()
    assert shown.exit_code == 0
    assert "swapped:" in shown.output
    data = json.loads(swap("-o", "json").output)
    assert len(data["curve"]) == 9
    assert data["chosen"]["seconds"] <= min(point["seconds"] for point in data["curve"])
    assert 0 < data["chosen"]["swapped"] < 4e9


def test_what_makes_no_sense():
    for words, message in (
        (("--tensors", 0), "swap.tensors = 0"),
        (("--disk", "fast"), "is no size"),
        (("--forward", -1), "swap.forward = -1"),
        (("--parameters", 0), "swap.parameters = 0"),
    ):
        refused = swap(*words)
        assert refused.exit_code != 0
        assert message in str(refused.exception) + refused.output
