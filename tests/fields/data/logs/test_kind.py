"""The job ``parse_logs``: planned, run, packed, scored against a truth, and refused."""

from __future__ import annotations

import csv
import gzip
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq
from typer.testing import CliRunner

from own_home import own_home
from shoal.app.cli import app
from shoal.core.errors import ConfigError, DataError, PlanError
from shoal.core.parts import Choice, table
from shoal.cost.score import Score
from shoal.fields.data.logs import execute
from shoal.fields.data.logs.costs import rates_of, timed
from shoal.fields.data.logs.events import EventWriter
from shoal.fields.data.logs.job import ParseLogsJob, ParseLogsReport
from shoal.fields.data.logs.kind import ParseLogsKind
from shoal.fields.data.logs.reading import LogFiles
from shoal.fields.data.logs.templates import substituted
from shoal.machine import load

LOGHUB = Path(os.environ.get("SHOAL_DATA", "")) / "loghub"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "made.log"
    lines = [
        f"081109 2036{at % 60:02} {at} INFO dfs.A: Received block blk_{at // 4} of size {at * 7}"
        if at % 3
        else f"081109 2036{at % 60:02} {at} WARN dfs.B: Deleting block blk_{at // 4}"
        for at in range(600)
    ]
    path.write_text("\r\n".join([*lines, "no header here"]))
    return path


def run(job: ParseLogsJob, directory: Path) -> ParseLogsReport:
    kind = ParseLogsKind()
    return kind.run(kind.plan(job, load("laptop"))[0], directory)


def test_events_templates_and_a_picture(tmp_path: Path, log: Path) -> None:
    report = run(ParseLogsJob(data=str(log)), tmp_path / "run")
    events = pq.read_table(tmp_path / "run" / "events.parquet")
    assert events.num_rows == 601 == report.measured["lines"]
    assert report.details["format"] == "HDFS"
    assert report.measured["no_header_share"] == pytest.approx(1 / 601)
    assert "line 601: no header here" in report.details["first_without_header"]
    with (tmp_path / "run" / "templates.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]] == ["EventId", "EventTemplate", "Occurrences"]
    templates = {int(row["EventId"][1:]) - 1: row["EventTemplate"] for row in rows}
    assert sorted(templates.values()) == sorted(
        ["Received block <*> of size <*>", "Deleting block <*>", "no header here"]
    )
    contents = [line.split(": ", 1)[-1] for line in log.read_text().splitlines()]
    for row, content in zip(events.to_pylist(), contents, strict=True):
        values = [value.encode() for value in row["parameters"]]
        assert substituted(templates[row["template_id"]].encode(), values).decode() == content
        assert (row["Level"] is None) == (not row["has_header"])
    assert events["Component"].to_pylist()[1] == "dfs.A"
    assert (tmp_path / "run" / "templates.svg").read_text().startswith("<svg")
    assert {"total_s", "bytes_per_s", "memory_bytes"} <= set(report.errors)
    assert {row.name for row in Score().rows()} == {"parse_logs"}
    text = "\n".join(map(str, ParseLogsKind().results(report, tmp_path / "run")))
    assert "0.17 % of the lines have no header of the format HDFS" in text


def test_a_compressed_log_and_a_directory_of_any_ending(tmp_path: Path, log: Path) -> None:
    place = tmp_path / "logs"
    place.mkdir()
    (place / "app.1.gz").write_bytes(gzip.compress(log.read_bytes()))
    (place / "app").write_bytes(log.read_bytes())
    report = run(ParseLogsJob(data=str(place)), tmp_path / "run")
    assert report.measured["lines"] == 1202
    assert report.measured["templates"] == 3


def test_the_log_of_imports_has_its_truth(tmp_path: Path) -> None:
    report = run(ParseLogsJob(data="imports"), tmp_path / "run")
    assert report.measured["lines"] > 1000
    assert report.measured["grouping_accuracy"] > 0.95
    assert report.measured["parsing_accuracy"] > 0.8
    assert 0 < report.measured["template_f1"] <= report.measured["group_f1"] <= 1


@pytest.mark.skipif(not LOGHUB.is_dir(), reason="no samples of Loghub below SHOAL_DATA")
def test_a_sample_of_loghub(tmp_path: Path) -> None:
    report = run(ParseLogsJob(data=str(LOGHUB / "Apache_2k.log")), tmp_path / "run")
    assert report.details["format"] == "Apache"
    assert report.measured["grouping_accuracy"] == 1.0
    assert report.measured["true_groups"] == 6


def test_a_truth_of_another_length_is_not_compared(tmp_path: Path, log: Path) -> None:
    log.with_name("made.log_structured.csv").write_text("EventId,EventTemplate\nE1,a\n")
    report = run(ParseLogsJob(data=str(log)), tmp_path / "run")
    assert report.details["truth"] == "1 lines of truth for 601 lines: not compared"
    assert "grouping_accuracy" not in report.measured


def test_anomalies_by_session(tmp_path: Path, log: Path) -> None:
    job = ParseLogsJob(data=str(log), anomalies=Choice(name="invariants"))
    report = run(job, tmp_path / "run")
    assert report.measured["groups"] == 150
    with (tmp_path / "run" / "anomalies.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 150
    assert rows[0]["group"].startswith("blk_")
    assert sum(int(row["anomalous"]) for row in rows) == report.measured["anomalies"]


def test_alerts_are_labels(tmp_path: Path) -> None:
    text = "".join(
        f"{'KERN' if at % 997 == 0 else '-'} 1117838570 2005.06.03 R02 2005-06-03-15.42.50.675872 "
        f"R02 RAS KERNEL INFO {'fatal stop' if at % 997 == 0 else 'corrected'} {at}\n"
        for at in range(2000)
    )
    (tmp_path / "bgl.log").write_text(text)
    job = ParseLogsJob(data=str(tmp_path / "bgl.log"), anomalies=Choice(name="clusters"), window=10)
    report = run(job, tmp_path / "run")
    assert report.measured["anomaly_f1"] > 0.9
    assert report.measured["groups"] == 200


def test_pack_and_unpack(tmp_path: Path, log: Path) -> None:
    pytest.importorskip("zstandard")
    report = run(ParseLogsJob(data=str(log), pack=True), tmp_path / "packed")
    container = tmp_path / "packed" / "log.packed"
    assert report.measured["packed_share"] == pytest.approx(
        container.stat().st_size / log.stat().st_size
    )
    run(ParseLogsJob(data=str(container), unpack=True), tmp_path / "back")
    assert (tmp_path / "back" / "unpacked.log").read_bytes() == log.read_bytes()


def test_a_stopped_run_does_not_mine_again(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ParseLogsJob(data=str(log))
    kind = ParseLogsKind()
    plan = kind.plan(job, load("laptop"))[0]
    run(job, tmp_path / "whole")
    mined = []
    with monkeypatch.context() as patch:
        patch.setattr(EventWriter, "table", stop)
        with pytest.raises(KeyboardInterrupt):
            kind.run(plan, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(execute, "_mine", lambda *given: mined.append(given))
        kind.run(plan, tmp_path / "run", resume=True)
    assert not mined
    for name in ("events.parquet", "templates.csv"):
        one, other = (tmp_path / place / name for place in ("whole", "run"))
        assert one.read_bytes() == other.read_bytes()
    assert not list((tmp_path / "run").glob(".mined*"))


def stop(*given: object) -> None:
    raise KeyboardInterrupt


def test_what_was_kept_of_another_log_or_is_damaged_is_not_used(tmp_path: Path, log: Path) -> None:
    path, files = tmp_path / "mined.npz", LogFiles(str(log))
    found = execute._MinedLines([b"a <*>", b"", b"b"], np.array([2, 0], np.int32), 1)
    execute._keep(path, files, found)
    again = execute._kept(path, files)
    assert again is not None
    assert (again.templates, again.ids.tolist(), again.without) == (found.templates, [2, 0], 1)
    path.write_bytes(path.read_bytes()[:-30])
    assert execute._kept(path, files) is None
    execute._keep(path, files, found)
    log.write_bytes(log.read_bytes() + b"\none more line")
    assert execute._kept(path, LogFiles(str(log))) is None


def test_the_command_line(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["run", "parse_logs", str(log), "--parser", "iplom", "-m", "laptop", "--dir", "out"]
    )
    assert done.exit_code == 0, done.output
    assert "Deleting block <*>" in done.output


def test_plans_are_ranked_and_predict(log: Path) -> None:
    plans = ParseLogsKind().plan(ParseLogsJob(data=str(log)), load("laptop"))
    assert {plan.job.parser.name for plan in plans if plan.job.parser} == set(table("log_parser"))
    assert plans[0].job.parser == Choice(name="drain")
    assert plans[0].format == "HDFS"
    more = ParseLogsKind().plan(
        ParseLogsJob(data=str(log), anomalies=Choice(name="pca")), load("laptop")
    )
    assert more[0].predicted["total_s"].value > plans[0].predicted["total_s"].value
    machine = load("laptop")
    tier = machine.device.main_memory.model_copy(update={"capacity_bytes": 1e6})
    device = machine.device.model_copy(update={"memory": (tier,)})
    with pytest.raises(PlanError, match="no parser fits"):
        ParseLogsKind().plan(
            ParseLogsJob(data=str(log)), machine.model_copy(update={"device": device})
        )


def test_rates_are_timed_here_and_assumed_elsewhere() -> None:
    pytest.importorskip("zstandard")
    here, there = timed(300), rates_of(load("laptop"))
    assert here.measured
    assert not there.measured
    for rates in (here, there):
        values = rates.model_dump(exclude={"spread", "measured"}).values()
        assert all(1e-11 < value < 1e-2 for value in values)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": "Hadop"}, "did you mean 'Hadoop'"),
        ({"header": "<A><Content>"}, "nothing between"),
        ({"masks": ("(",)}, "masks"),
        ({"session": "("}, "session"),
        ({"pack": True, "unpack": True}, "one of them"),
        ({"window": 10, "stride": 20}, "leave out"),
        ({"parser": "drane"}, "drain"),
        ({"anomalies": "pcaa"}, "pca"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    log: Path, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        job = ParseLogsJob.model_validate({"data": str(log), **changes})
        ParseLogsKind().plan(job, load("laptop"))


def test_files_that_are_no_logs(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(np.arange(1000, dtype=np.int32).tobytes())
    (tmp_path / "wide").write_bytes("a line\n".encode("utf-16"))
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8b nothing")
    for name, why in (
        ("binary", "binary, not a log"),
        ("wide", "UTF-16"),
        ("broken.gz", "cannot be read"),
        ("absent", "no such file"),
    ):
        with pytest.raises(DataError, match=why):
            ParseLogsKind().plan(ParseLogsJob(data=str(tmp_path / name)), load("laptop"))
    with pytest.raises(DataError, match="no container"):
        ParseLogsKind().plan(ParseLogsJob(data=str(tmp_path / "wide"), unpack=True), load("laptop"))
