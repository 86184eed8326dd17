"""``shoal explain schedule`` as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app
from shoal.core.errors import ShoalError
from shoal.plan.schedules import SCHEDULES
from shoal.plan.schedules.torch_csv import from_torch_csv


def shoal(*words: object) -> Result:
    # A pipe is given more room than a terminal, and says nothing of its width.
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["schedule", *map(str, words)])


def refused(*words: object) -> str:
    """The one line that the command line makes of an error."""
    done = shoal(*words)
    assert isinstance(done.exception, ShoalError), done.output
    return str(done.exception)


def test_shows_makespan_bubble_what_is_held_and_who_does_what() -> None:
    done = shoal("1f1b", "--pp", 4, "--microbatches", 8)
    assert done.exit_code == 0, done.output
    assert "1f1b: makespan 33, bubble 37.5 % of the work" in done.stdout
    assert "in flight" in done.stdout
    rows = done.stdout.splitlines()
    assert [int(row.split()[-1]) for row in rows if row.split()[1:2] == ["0"]][:1] == [4]
    assert "3 ......F0B0--F1B1--" in done.stdout


@pytest.mark.parametrize("name", tuple(SCHEDULES))
def test_every_schedule_is_shown(name: str) -> None:
    done = shoal(name, "-o", "json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    part = SCHEDULES.build(name)
    assert data["bubble"] == pytest.approx(part.bubble(4, 8, part.chunks or 2))
    assert data["busy"] == [24.0] * 4
    assert len(data["events"]) == data["passes"]


def test_interleaving_and_sending_are_priced() -> None:
    slow = json.loads(shoal("1f1b", "-o", "json").stdout)["makespan"]
    fast = json.loads(shoal("interleaved", "--vpp", 4, "-o", "json").stdout)["makespan"]
    assert slow / fast == pytest.approx(33 / 26.25)
    sent = shoal("interleaved", "--vpp", 4, "--send", 0.5, "-o", "json")
    assert json.loads(sent.stdout)["makespan"] > fast


def test_vocabulary_balances_the_output_layer() -> None:
    words = ("1f1b", "--microbatches", 16, "--output-layer", 2, "-o", "json")
    naive = json.loads(shoal(*words).stdout)
    for barriers in (1, 2):
        ours = json.loads(shoal(*words, "--vocab-barriers", barriers).stdout)
        assert sum(ours["busy"]) == pytest.approx(sum(naive["busy"]))
        assert max(ours["busy"]) == min(ours["busy"])
        assert max(ours["in_flight"]) == 4 + barriers
        assert naive["makespan"] / ours["makespan"] > 1.79


def test_writes_a_picture_a_page_a_trace_and_csv(tmp_path: Path) -> None:
    drawn = tmp_path / "it.svg"
    done = shoal("zbv", "--unit", "ms", "--picture", drawn, "--out", tmp_path, "-o", "json")
    assert done.exit_code == 0, done.output
    files = {kind: tmp_path / f"zbv.{kind}" for kind in ("html", "json", "csv")}
    assert all(f"wrote {path}" in done.stderr for path in (drawn, *files.values()))
    assert json.loads(done.stdout)["makespan"] == pytest.approx(25.5e-3)
    assert ElementTree.parse(drawn).getroot().tag.endswith("svg")
    assert "25.5 ms" in files["html"].read_text()
    passes = [e for e in json.loads(files["json"].read_text())["traceEvents"] if "ts" in e]
    assert max(e["ts"] + e["dur"] for e in passes) == pytest.approx(25500)
    assert from_torch_csv(files["csv"].read_text()).ops == SCHEDULES.build("zbv").build(4, 8, 2).ops
    again = shoal(files["csv"], "--unit", "ms")
    assert "zbv: makespan 25.5 ms" in again.stdout


def test_saves_what_is_named_and_nothing_where_one_cannot_be(tmp_path: Path) -> None:
    words = ("1f1b", "--vocab-barriers", 1, "--out", tmp_path / "out")
    assert "no passes of the vocabulary" in refused(*words, "--picture", tmp_path / "it.svg")
    assert not list(tmp_path.iterdir())
    assert shoal(*words, "--save", "[perfetto]").exit_code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["1f1b+vocab1.json"]


def test_many_ranks_are_shown_by_the_first_and_the_last() -> None:
    done = shoal("1f1b", "--pp", 40, "--microbatches", 2)
    assert "24 ranks between them are not shown" in done.stdout
    assert "\n39 " in done.stdout and "\n20 " not in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("1f2b",), ("schedule = '1f2b'", "did you mean '1f1b'")),
        (("1f1b", "--vpp", 2), ("parallel.vpp = 2", "1 with schedule 1f1b")),
        (("interleaved", "--microbatches", 6), ("multiple of pp = 4", "4 or 8")),
        (("1f1b", "--pp", 0), ("parallel.pp", "at least 1")),
        (("1f1b", "--microbatches", -3), ("microbatches", "at least 1")),
        (("1f1b", "--forward", "nan"), ("schedule.forward = 'nan'",)),
        (("1f1b", "--forward", 0), ("schedule.forward = 0", "above 0")),
        (("1f1b", "--send", -1), ("schedule.send = -1", "at least 0")),
        (("1f1b", "--unit", "h"), ("schedule.unit = 'h'", "'s', 'ms', 'us' or 'none'")),
        (("1f1b", "--vocab-barriers", 3), ("schedule.vocab_barriers = 3", "0, 1 or 2")),
        (("1f1b", "--pp", 4096, "--microbatches", 4096), ("--pp", "at most")),
        (("no.csv",), ("no.csv", "cannot be read")),
        (("1f1b", "--save", "[pdf]"), ("schedule.save.0 = 'pdf'", "'html', 'perfetto' or 'csv'")),
        (("1f1b", "--microbatches", 9999, "--picture", "x.svg"), ("79992 passes", "Perfetto")),
    ],
)
def test_errors_name_the_fix(words: tuple[object, ...], told: tuple[str, ...]) -> None:
    message = refused(*words)
    assert all(word in message for word in told), message


@pytest.mark.slow
def test_is_a_command_with_examples_and_needs_no_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "explain", "schedule", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "shoal explain schedule 1f1b --pp 4 --microbatches 8" in done.stdout
    script = (
        "import sys; from shoal.app.commands.explain import app\n"
        f"app(['schedule', 'vhalf', '--out', {str(tmp_path)!r}], "
        "standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "vhalf.html").is_file()


def test_the_timeline_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = shoal("zbv", "--microbatches", 40)
    rows = [line for line in done.stdout.splitlines() if re.match(r"\d [.FBIW]", line)]
    assert len(rows) == 4 and max(map(len, rows)) <= 80
