"""What machines take for graphs: timed once, and kept."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

from shoal.core.native import cpu_model
from shoal.machine import load


@pytest.mark.parametrize(
    ("what", "small"),
    [
        ("embedding", {"_NODES": 2000, "_EDGES": 10_000}),
        ("communities", {"_VERTICES": 5000}),
        pytest.param("gnn", {}, marks=pytest.mark.slow),
    ],
)
def test_rates_are_timed_once_and_kept(what, small, monkeypatch, tmp_path):
    costs = import_module(f"shoal.fields.graph.{what}.costs")
    for name, value in small.items():
        monkeypatch.setattr(costs, name, value)
    here = load("laptop").model_copy(update={"fingerprint": {"cpu": cpu_model()}})
    rates = costs.rates_of(here)
    assert all(value > 0 for value in rates.model_dump().values())
    assert costs.rates_of(here) == rates
    assert json.loads((tmp_path / "home" / f"{what}.json").read_text())
