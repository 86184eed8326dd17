import sqlite3

import pytest

from shoal.core.errors import StoreError
from shoal.cost.score import Score, calibrate
from shoal.cost.shapes import find
from shoal.ir import Device, Estimate, Interval, Machine, MemoryTier, Plan, Report, TrainJob

MACHINE = Machine(
    name="m",
    device=Device(
        name="c", kind="cpu", num_cores=2, memory=(MemoryTier(name="dram", capacity_bytes=1),)
    ),
)


def report(measured, predicted=1.0, **job):
    cost = Estimate(
        step_s=Interval.around(predicted, 0.2),
        terms_s={"matmul": predicted},
        memory_bytes={"weights": 100.0},
        tokens=10,
    )
    plan = Plan(job=TrainJob(**job), machine=MACHINE, shape=find("shoal-4m"), estimate=cost)
    return Report(plan=plan, measured={"step_s": measured, "memory_bytes": 110.0, "loss": 2.0})


def test_append_and_read_back(tmp_path):
    score = Score(tmp_path / "score.db")
    for value in (1.1, 1.15, 1.5):
        score.append(report(value))
    rows = Score(tmp_path / "score.db").rows(quantity="step_s")
    assert [row.measured for row in rows] == [1.1, 1.15, 1.5]
    assert rows[0].error == pytest.approx(0.1)
    assert [row.inside for row in rows] == [True, True, False]
    assert score.reports()[2] == report(1.5)
    summary = {s.quantity: s for s in score.errors()}
    assert set(summary) == {"step_s", "memory_bytes"}
    assert summary["step_s"].median == pytest.approx(0.15)
    assert summary["step_s"].p90_abs == pytest.approx(0.43)
    assert summary["step_s"].inside == pytest.approx(2 / 3)
    assert summary["memory_bytes"].inside is None


def test_write_ahead_log(tmp_path):
    score = Score(tmp_path / "score.db")
    with sqlite3.connect(score.path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_newer_foreign_and_broken_files_are_refused(tmp_path):
    path = tmp_path / "score.db"
    Score(path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(StoreError, match="newer version"):
        Score(path)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE notes (x)")
    with pytest.raises(StoreError, match="something else"):
        Score(other)
    text = tmp_path / "text.db"
    text.write_text("not a database at all, but long enough to be looked at" * 20)
    with pytest.raises(StoreError, match=r"text\.db"):
        Score(text)
    with pytest.raises(StoreError, match="cannot be made"):
        Score(text / "below" / "score.db")


def test_calibration_needs_three_similar_runs(tmp_path):
    score = Score(tmp_path / "score.db")
    job, cost = TrainJob(), report(1.0).plan.estimate
    for value in (1.30, 1.32):
        score.append(report(value))
    score.append(report(9.0, precision="fp32"))
    same, note = calibrate(cost, score.rows(), job=job, machine=MACHINE)
    assert same == cost and note == ""
    score.append(report(1.28))
    changed, note = calibrate(cost, score.rows(), job=job, machine=MACHINE)
    assert changed.step_s.value == pytest.approx(1.30)
    assert sum(changed.terms_s.values()) == pytest.approx(1.30)
    assert changed.step_s.high / changed.step_s.low < cost.step_s.high / cost.step_s.low
    assert "1.30" in note and "3 past runs" in note
