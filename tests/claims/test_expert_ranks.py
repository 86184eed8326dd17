"""Ranks of the claims about experts: scaled mixtures, and what is timed on four processes."""

from __future__ import annotations

from typing import Any

from shoal.claims.catalogue import row_of
from shoal.claims.experiments.expert_ranks import scaled
from shoal.claims.experiments.hecate import _PLACERS
from shoal.claims.experiments.hecate import _small as placed
from shoal.claims.experiments.moe_folding import _RUN, _small, shapes
from shoal.claims.ranks import on_ranks

_RANKS = "shoal.claims.experiments.expert_ranks"


def test_every_mixture_has_a_row_of_its_own() -> None:
    row = row_of(92)
    names = {metric.name: metric for metric in row.metrics}
    assert {f"simulated_{name}" for name in shapes()} == {n for n in names if "simulated" in n}
    assert all(names[name].timing and not names[name].check for name in _RUN)


def test_widths_are_a_part_and_heads_are_not() -> None:
    shape = shapes()["mixtral_8x22b_g8t8"]
    config = scaled(shape, 16, layers=1, experts=64, length=256)
    assert (config.hidden, config.ffn_hidden, config.head_dim) == (384, 128, 8)
    assert (config.num_heads, config.num_kv_heads, config.top_k) == (48, 8, 8)


def test_jobs_make_steps_in_turn() -> None:
    config = scaled(shapes()["mixtral_8x22b"], 64, layers=1, experts=8, length=16)
    jobs = {"folded": _small(8, 16, fold=True), "inside": _small(8, 16, fold=False)}
    given: dict[str, Any] = {"config": config, "rounds": 2}
    for rank in on_ranks(f"{_RANKS}:steps_s", 4, jobs=jobs, **given):
        assert set(rank) == set(jobs)
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in rank.values())
    alone = on_ranks(f"{_RANKS}:passes_s", 2, job=_small(2, 16, fold=None), **given)
    assert all(len(seconds) == 2 for seconds in alone)


def test_placers_make_steps_and_experts_move() -> None:
    config = scaled(shapes()["mixtral_8x22b"], 64, layers=1, experts=16, length=16)
    moving = {"name": "fssdp", "slots": 0, "resharding_every": 2}
    placers = {**_PLACERS, "moving": moving, "fssdp": {"name": "fssdp", "slots": 2}}
    jobs = {name: placed(16, placer) for name, placer in placers.items()}
    ranks = on_ranks(f"{_RANKS}:steps_s", 4, jobs=jobs, config=config, rounds=1, steps=3)
    assert all(set(rank) == set(placers) for rank in ranks)
