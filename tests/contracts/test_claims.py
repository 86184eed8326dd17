"""One battery over every claim: what it says can be judged, and quickly."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.claims import CLAIMS
from shoal.claims.catalogue import catalogue
from shoal.claims.record import recheck
from shoal.claims.run import run

RESULTS = Path(__file__).parents[2] / "results"
SOURCE = Path(__file__).parents[2] / "src" / "shoal"

each_claim = pytest.mark.parametrize("name", list(CLAIMS))


@each_claim
def test_says_what_can_be_judged(name: str) -> None:
    experiment = CLAIMS.load(name)
    names = [metric.name for metric in experiment.metrics]
    assert names
    assert len(set(names)) == len(names)
    assert any(metric.quick for metric in experiment.metrics), "nothing for a quick run"
    assert all(metric.baseline for metric in experiment.metrics), "no baseline named"
    assert {attempt.metric for attempt in experiment.attempts} <= set(names)


@each_claim
def test_rows_and_catalogue_name_each_other(name: str) -> None:
    rows = CLAIMS.load(name).rows
    assert rows
    assert {row.id for row in catalogue() if row.claim == name} == set(rows)


def test_catalogue_names_only_claims_that_exist() -> None:
    assert {row.claim for row in catalogue() if row.claim} <= set(CLAIMS)


def test_parts_of_built_rows_are_where_the_catalogue_says() -> None:
    for row in catalogue():
        for part in row.parts if row.claim else ():
            at = SOURCE.joinpath(*part.split("."))
            assert at.is_dir() or at.with_suffix(".py").is_file(), f"row {row.id}: {part}"


@each_claim
def test_result_on_file_follows_from_its_samples(name: str) -> None:
    path = RESULTS / f"{name}.json"
    if path.exists():
        assert recheck(path).rows == tuple(CLAIMS.load(name).rows)


@pytest.mark.slow
@each_claim
def test_quick_run_is_judged_and_agrees(name: str) -> None:
    """The A/A rule holds, every quick metric is told, and the full run on file says the same."""
    said: list[float] = []
    result = run(name, quick=True, results=RESULTS, progress=lambda _, done: said.append(done))
    assert result.disagrees == ()
    assert not result.verdict.reason.startswith("void"), result.verdict.reason
    judged = {metric.name for metric in result.verdict.metrics} | set(result.verdict.skipped)
    if result.verdict.metrics:
        assert judged == {metric.name for metric in CLAIMS.load(name).metrics if metric.quick}
    assert all(0.0 <= done <= 1.0 for done in said)
