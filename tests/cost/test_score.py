import sqlite3

import pytest

from shoal.core.errors import StoreError
from shoal.cost.score import Score, run_id
from shoal.cost.shapes import find
from shoal.ir import (
    Device,
    Estimate,
    Interval,
    Machine,
    MemoryTier,
    TrainJob,
    TrainPlan,
    TrainReport,
)

MACHINE = Machine(
    name="m",
    device=Device(
        name="c", kind="cpu", num_cores=2, memory=(MemoryTier(name="dram", capacity_bytes=10**9),)
    ),
)


def report(measured, predicted=1.0, **job):
    cost = Estimate(
        step_s=Interval.around(predicted, 0.2),
        terms_s={"matmul": predicted},
        memory_bytes={"weights": 100.0},
        tokens=10,
    )
    plan = TrainPlan(job=TrainJob(**job), machine=MACHINE, shape=find("shoal-4m"), estimate=cost)
    return TrainReport(plan=plan, measured={"step_s": measured, "memory_bytes": 110.0, "loss": 2.0})


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
    with pytest.raises(StoreError, match="another program"):
        Score(other)
    text = tmp_path / "text.db"
    text.write_text("not a database at all, but long enough to be looked at" * 20)
    with pytest.raises(StoreError, match=r"text\.db"):
        Score(text)
    with pytest.raises(StoreError, match="cannot be made"):
        Score(text / "below" / "score.db")


def _version_1(path, texts):
    """A store as the first version wrote it."""
    with sqlite3.connect(path) as connection:
        connection.executescript(
            """
            CREATE TABLE runs (id INTEGER PRIMARY KEY, recorded_s REAL NOT NULL,
              name TEXT NOT NULL, model TEXT NOT NULL, machine TEXT NOT NULL,
              quantity TEXT NOT NULL, predicted REAL, low REAL, high REAL,
              measured REAL NOT NULL, run INTEGER NOT NULL REFERENCES reports(id));
            CREATE TABLE reports (id INTEGER PRIMARY KEY, recorded_s REAL NOT NULL,
              report TEXT NOT NULL);
            CREATE INDEX runs_by_machine ON runs (machine, quantity);
            PRAGMA user_version=1;
            """
        )
        for number, text in enumerate(texts, start=1):
            connection.execute("INSERT INTO reports VALUES (?, ?, ?)", (number, 7.0, text))
            connection.execute(
                "INSERT INTO runs VALUES (NULL, 7, 'run', 'shoal-4m', 'm', 'step_s', 1, 0.8, 1.2, "
                "1.1, ?)",
                (number,),
            )
    connection.close()


def test_a_store_of_version_1_is_brought_up_to_date_in_place(tmp_path):
    path = tmp_path / "score.db"
    _version_1(path, [report(1.1).model_dump_json(), report(1.2, name="two").model_dump_json()])
    score = Score(path)
    assert score.reports() == [report(1.1), report(1.2, name="two")]
    assert [row.job.name for row in score.rows()] == ["run", "two"]
    first, second = sorted(score.run_dirs(), key=lambda entry: entry.id)
    assert (first.id, first.kind, first.name, first.model) == (
        "report-1",
        "train",
        "run",
        "shoal-4m",
    )
    assert second.name == "two" and second.path is None and second.ended
    score.append(report(1.3))
    assert len(Score(path).run_dirs()) == 3


def test_directories_of_runs_are_remembered(tmp_path):
    score = Score(tmp_path / "score.db")
    assert score.run_dirs() == []
    one, two = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    identity = score.register(one, "train", "one", "shoal-4m")
    score.register(two, "train", "two")
    assert identity == run_id(one) != run_id(two)
    assert [entry.name for entry in score.run_dirs()] == ["two", "one"]
    assert not score.run_dirs()[1].ended
    score.append(report(1.1, name="one"), one)
    result = {entry.name: entry for entry in score.run_dirs()}
    assert result["one"].ended and result["one"].path == one and result["one"].report == 1
    assert result["two"].report is None
    score.register(one, "train", "one", "shoal-4m")  # it goes on
    again = {entry.name: entry for entry in score.run_dirs()}["one"]
    assert again.report == 1 and not again.ended
    score.append(report(1.2, name="one"), one)
    newest = {entry.name: entry for entry in score.run_dirs()}["one"]
    assert newest.ended and newest.report == 2
    numbers = score.quantities([2])[2]
    assert numbers["step_s"].error == pytest.approx(0.2)
    assert numbers["loss"].predicted is None and numbers["loss"].error is None
    assert score.report(2) == report(1.2, name="one") and score.report(9) is None


def test_rows_without_jobs(tmp_path):
    score = Score(tmp_path / "score.db")
    score.append(report(1.1))
    (row,) = score.rows(quantity="step_s", jobs=False)
    assert row.job is None and row.error == pytest.approx(0.1)


def test_what_another_kind_of_device_measured_is_not_counted(tmp_path):
    """A CPU's times say nothing about a prediction for a GPU, whoever recorded them."""
    gpu = MACHINE.model_copy(update={"device": MACHINE.device.model_copy(update={"kind": "gpu"})})
    score = Score(tmp_path / "score.db")
    for device in ("cpu", "gpu", ""):
        one = report(70.0)
        plan = one.plan.model_copy(update={"machine": gpu})
        score.append(one.model_copy(update={"plan": plan, "device": device}))
    rows = score.rows(quantity="step_s")
    assert [row.elsewhere for row in rows] == [True, False, False]
    assert [row.error for row in rows] == [None, pytest.approx(69.0), pytest.approx(69.0)]
    assert rows[0].inside is None and rows[0].predicted == 1.0
    assert len(score.rows(quantity="step_s", scored=True)) == 2
    assert {s.quantity: s.count for s in score.errors()} == {"step_s": 2, "memory_bytes": 2}
    numbers = score.quantities([1, 2])
    assert numbers[1]["step_s"].measured == 70.0 and numbers[1]["step_s"].predicted is None
    assert numbers[2]["step_s"].predicted == 1.0


def test_a_store_of_version_2_learns_where_its_runs_were_measured(tmp_path):
    gpu = MACHINE.model_copy(update={"device": MACHINE.device.model_copy(update={"kind": "gpu"})})
    score = Score(tmp_path / "score.db")
    for torch in ("2.13.0+cpu", "2.13.0+cu130"):
        one = report(70.0)
        plan = one.plan.model_copy(update={"machine": gpu})
        score.append(one.model_copy(update={"plan": plan, "versions": {"torch": torch}}))
    with sqlite3.connect(score.path) as connection:
        connection.execute("DROP INDEX reports_by_device")
        connection.execute("ALTER TABLE reports DROP COLUMN device")
        connection.execute("ALTER TABLE runs DROP COLUMN left_out")
        connection.execute("PRAGMA user_version=2")
    connection.close()
    rows = Score(score.path).rows(quantity="step_s")
    assert [row.elsewhere for row in rows] == [True, False]


def _run(starts=1, finished=1.0, plans=1, minutes=None, steps=50.0, step_s=1.1):
    """A report as training writes it."""
    one = report(step_s)
    more = {"starts": float(starts), "finished": finished, "steps": steps, "total_s": 50 * step_s}
    return one.model_copy(
        update={
            "plan": one.plan.model_copy(update={"minutes": minutes}),
            "measured": one.measured | more,
            "details": {"plans": plans},
        }
    )


def _why(score, quantity="step_s"):
    return [row.left_out for row in score.rows(quantity=quantity)]


def test_a_run_counts_once_at_its_end_under_the_plan_that_was_priced(tmp_path):
    score = Score(tmp_path / "score.db")
    place, other = tmp_path / "one", tmp_path / "two"
    for path in (place, other):
        score.register(path, "train", "run")
    score.append(_run(finished=0.0, step_s=9.0), place)
    score.append(_run(starts=2, step_s=1.2), place)  # it went on, and this is its end
    score.append(_run(starts=3, step_s=9.1), place)  # and once more
    score.append(_run(starts=1, step_s=1.3), place)  # removed, and run anew in the same place
    score.append(_run(starts=2, plans=2, step_s=9.2), other)
    why = _why(score)
    assert "stopped before" in why[0] and "after its end" in why[2] and "another plan" in why[4]
    assert why[1] == why[3] == ""
    summary = {one.quantity: one for one in score.errors()}
    assert (summary["step_s"].count, summary["memory_bytes"].count) == (2, 2)
    assert summary["step_s"].median == pytest.approx(0.25)
    assert [one.measured["step_s"] for one, _ in score.counted_reports()] == [1.2, 1.3]


def test_the_same_log_read_twice_counts_once(tmp_path):
    score = Score(tmp_path / "score.db")
    for value in (1.1, 1.1, 1.2):
        score.append(report(value))
    assert [bool(why) for why in _why(score)] == [False, True, False]


def test_times_of_runs_that_minutes_decided_and_of_few_steps_are_noise(tmp_path):
    score = Score(tmp_path / "score.db")
    score.append(_run(steps=4.0, step_s=3.0), tmp_path / "short")
    score.append(_run(minutes=1.0, step_s=1.2), tmp_path / "minutes")
    score.append(_run(step_s=1.3), tmp_path / "steps")
    assert [bool(why) for why in _why(score)] == [True, False, False]
    assert [bool(why) for why in _why(score, "memory_bytes")] == [False] * 3
    assert [bool(why) for why in _why(score, "total_s")] == [True, True, False]


def test_rows_of_an_older_version_are_judged_and_repair_judges_again(tmp_path):
    path = tmp_path / "score.db"
    texts = [_run(finished=0.0), _run(step_s=1.2), _run(steps=3.0)]
    _version_1(path, [one.model_dump_json() for one in texts])
    score = Score(path)
    assert [bool(why) for why in _why(score)] == [True, False, True]
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE runs SET left_out = CASE id WHEN 2 THEN 'old rule' ELSE '' END")
    connection.close()
    assert score.repair() == (2, 1)
    assert [bool(why) for why in _why(score)] == [True, False, True]
    assert score.repair() == (0, 0)
