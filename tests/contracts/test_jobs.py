"""What holds for every kind of job: the battery over the table, and a kind of another package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.core.config import resolve
from shoal.core.errors import ConfigError, UnknownKeyError, UnknownPartError
from shoal.core.files import to_yaml
from shoal.cost.score import Score
from shoal.ir import Job, Plan, compared, kind_named, kinds, predictions
from shoal.plan.saved import read_plan

from .conftest import small_machine

KINDS = sorted(kinds())
RUN = CliRunner()


def planned(name: str) -> list[Plan[Any]]:
    kind = kind_named(name)
    return list(kind.plan(kind.job_type.model_validate(kind.example), small_machine()))


@pytest.mark.parametrize("name", KINDS)
def test_facts(name: str) -> None:
    kind = kind_named(name)
    assert issubclass(kind.job_type, Job)
    assert kind.job_type.model_fields["job"].default == name
    names = [quantity.name for quantity in kind.quantities]
    assert len(set(names)) == len(names)
    assert sum(quantity.headline for quantity in kind.quantities) == 1
    (headline,) = (quantity for quantity in kind.quantities if quantity.headline)
    assert headline.better
    assert kind.summary[0].islower()


@pytest.mark.parametrize("name", KINDS)
def test_a_flag_sets_what_it_says(name: str, tmp_path: Path) -> None:
    """Each names a value of the job: one that is wrong is refused, and not as unknown."""
    kind = kind_named(name)
    base = kind.job_type.model_validate(kind.example)
    for flag in kind.flags:
        with pytest.raises(ConfigError, match=flag.path) as caught:  # of no value of a job
            resolve(kind.job_type, base=base, environment={}, flags={flag.path: [[]]})
        assert not isinstance(caught.value, UnknownKeyError), flag


@pytest.mark.parametrize("name", KINDS)
def test_a_plan_predicts_its_quantities_and_is_read_back(name: str, tmp_path: Path) -> None:
    kind = kind_named(name)
    best = planned(name)[0]
    result = predictions(best)
    known = {quantity.name: quantity for quantity in kind.quantities}
    headline = next(quantity.name for quantity in kind.quantities if quantity.headline)
    assert headline in result
    others = {key for key in result if key not in known}
    # Percentiles beyond those that people read are predicted too.
    assert all(key.endswith("_s") for key in others), others
    assert kind.describe(best)
    best.save(tmp_path / "plan.yaml")
    again = read_plan(tmp_path / "plan.yaml")
    assert type(again) is kind.plan_type
    assert again == best


@pytest.mark.parametrize("name", KINDS)
def test_a_report_is_scored_and_read_back(name: str, tmp_path: Path) -> None:
    """What was planned and what was measured meet in one row; the error is that of both."""
    kind = kind_named(name)
    best = planned(name)[0]
    headline = next(quantity.name for quantity in kind.quantities if quantity.headline)
    predicted = predictions(best)[headline].value
    report = kind.report_type(
        plan=best, measured={headline: predicted * 1.25}, errors={headline: 0.25}
    )
    score = Score(tmp_path / "score.db")
    score.append(report)
    (row,) = score.rows()
    assert (row.quantity, row.predicted, row.job) == (headline, predicted, best.job)
    assert row.error == pytest.approx(0.25)
    assert score.reports() == [report]
    ((_, before, measured, error),) = compared(report)
    assert before
    assert measured
    assert error == "+25.0 %"


@pytest.mark.parametrize("name", KINDS)
def test_the_command_line_knows_it(name: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(to_yaml({"job": name, **kind_named(name).example}))
    shown = RUN.invoke(app, ["run", name, str(file), "--dry-run", "-m", "laptop", "-o", "json"])
    assert shown.exit_code == 0, shown.output
    assert f'"job": "{name}"' in shown.stdout
    help_ = RUN.invoke(app, ["run", name, "--help"]).output
    words = [flag.name.replace("_", "-") for flag in kind_named(name).flags]
    assert all(f"--{word}" in help_ for word in words)
    assert name in RUN.invoke(app, ["run", "--help"]).output


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_another_kind_is_refused(name: str, tmp_path: Path) -> None:
    other = next(kind for kind in KINDS if kind != name)
    file = tmp_path / "job.yaml"
    file.write_text(to_yaml({"job": other, **kind_named(other).example}))
    done = RUN.invoke(app, ["run", name, str(file), "--dry-run"])
    assert isinstance(done.exception, ConfigError)
    assert f"shoal run {other} {file}" in str(done.exception)
    assert sorted(tmp_path.iterdir()) == [file]


def test_an_unknown_kind_names_the_nearest() -> None:
    for verb in ("plan", "run"):
        done = RUN.invoke(app, [verb, "trian", "job.yaml"])
        assert isinstance(done.exception, UnknownPartError)
        assert "did you mean 'train'" in str(done.exception)


def test_plans_and_reports_of_version_0_1_are_read(tmp_path: Path) -> None:
    """A drafter's plan had fields of its own; training plans did not name their kind."""
    drafter, train = planned("drafter")[0], planned("train")[0]
    raw = drafter.model_dump(mode="json", exclude_none=True)
    value = raw.pop("predicted")
    file = tmp_path / "plan.yaml"
    file.write_text(to_yaml({**raw, **{name: int(row["value"]) for name, row in value.items()}}))
    assert read_plan(file) == drafter
    old = {"plan": {**raw, "parameters": 7, "drafter_bytes": 14}, "measured": {"loss": 2.0}}
    report = kind_named("drafter").report_type.model_validate({**old, "calibration": [[0.5]]})
    assert report.details == {"calibration": [[0.5]]}
    assert report.plan.predicted["drafter_bytes"].value == 14
    raw = train.model_dump(mode="json", exclude_none=True)
    del raw["job"]["job"]
    file.write_text(to_yaml(raw))
    assert read_plan(file) == train
