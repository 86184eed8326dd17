"""``scripts/gpu`` as far as it runs without a GPU: the dry run, and how calls go on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu import call, child, frame, table, wheels  # noqa: E402
from gpu.frame import Case  # noqa: E402

from own_home import own_home  # noqa: E402
from shoal.core.errors import MachineError  # noqa: E402

STAMP = {"device": "card", "driver": "1", "torch": "2"}
PLACE = types.SimpleNamespace(stamp=STAMP, free=lambda: None)
# What a stage's process is in these tests: the same frame, without torch and without a GPU.
STANDIN = """
import os, sys, time, types
from pathlib import Path
from gpu import frame
from gpu.frame import Case

def crash():
    os._exit(9)

def hang():
    time.sleep(60)

def fails():
    raise ValueError("no | such\\nkernel")

def make(place):
    said = lambda: {"seconds": 1.0}
    for name, measure in CASES:
        yield Case(name, 0.1, said, measure)

NAMES = os.environ["CASES"].split()
CASES = [(name, globals().get(name, lambda: {"seconds": 2.0})) for name in NAMES]
if "broken" in NAMES:
    raise SystemExit(4)
sys.modules["gpu.fake"] = types.SimpleNamespace(cases=make)
stage, out, seconds = sys.argv[1:]
place = types.SimpleNamespace(stamp=%r, free=lambda: None)
sys.exit(frame.run_stage(stage, Path(out), time.monotonic() + float(seconds), place))
"""


@pytest.fixture
def stage(monkeypatch):
    """Makes a stage ``fake`` of these cases."""

    def make(*cases: Case) -> None:
        module = types.SimpleNamespace(cases=lambda place: iter(cases))
        monkeypatch.setitem(sys.modules, "gpu.fake", module)

    return make


def case(name: str, measure: Any = lambda: {"seconds": 2.0}, seconds: float = 1.0) -> Case:
    return Case(name, seconds, lambda: {"seconds": 1.0}, measure)


def run(out: Path, seconds: float = 60.0) -> int:
    return frame.run_stage("fake", out, time.monotonic() + seconds, PLACE, lambda text: None)


def test_a_prediction_is_on_file_before_its_measurement(stage, tmp_path):
    def measure() -> dict[str, Any]:
        row = frame.read(tmp_path, "fake")["one"]
        assert row["predicted"] == {"seconds": 1.0} and not frame.ended(row)
        return {"seconds": 2.0}

    stage(case("one", measure))
    assert run(tmp_path) == frame.DONE
    row = frame.read(tmp_path, "fake")["one"]
    assert row["measured"] == {"seconds": 2.0} and row["stamp"] == STAMP


def test_a_call_goes_on_where_one_stopped(stage, tmp_path):
    calls: list[str] = []
    made = [case(name, lambda name=name: calls.append(name) or {"seconds": 1.0}) for name in "abc"]
    stage(*made[:2])
    assert run(tmp_path) == frame.DONE
    stage(*made)
    assert run(tmp_path) == frame.DONE
    assert calls == ["a", "b", "c"]


def test_a_failing_case_ends_the_process_and_no_other_case(stage, tmp_path):
    def fail() -> dict[str, Any]:
        raise RuntimeError("illegal memory access\nmore")

    def missing() -> dict[str, Any]:
        raise frame.NotHereError("torchao is not installed")

    stage(case("bad", fail), case("absent", missing), case("good"))
    assert run(tmp_path) == frame.AGAIN
    assert "good" not in frame.read(tmp_path, "fake")
    assert run(tmp_path) == frame.DONE
    rows = frame.read(tmp_path, "fake")
    assert rows["bad"]["error"] == "RuntimeError: illegal memory access more"
    assert rows["absent"]["skipped"] == "torchao is not installed"
    assert rows["good"]["measured"]
    assert frame.failures(tmp_path, ("fake",)) == ["fake: bad"]
    frame.forget(tmp_path, "fake", everything=False)
    assert list(frame.read(tmp_path, "fake")) == ["good"]
    frame.forget(tmp_path, "fake", everything=True)
    assert not frame.read(tmp_path, "fake")


def test_a_case_that_does_not_fit_waits_and_shorter_ones_do_not(stage, tmp_path):
    stage(case("long", seconds=100.0), case("short"))
    assert run(tmp_path, seconds=10.0) == frame.LATER
    assert list(frame.read(tmp_path, "fake")) == ["short"]
    assert run(tmp_path, seconds=200.0) == frame.DONE


def test_rows_of_another_card_are_not_gone_on_with(stage, tmp_path):
    stage(case("one"), case("two"))
    assert run(tmp_path) == frame.DONE
    other = types.SimpleNamespace(stamp={**STAMP, "driver": "2"})
    with pytest.raises(MachineError, match=r"one was measured elsewhere \(driver differs\).*--out"):
        frame.run_stage("fake", tmp_path, time.monotonic() + 9, other, lambda text: None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stage": "fake"}'])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "fake.json").write_text(text)
    with pytest.raises(MachineError, match=r"fake\.json: no rows of scripts/gpu"):
        frame.read(tmp_path, "fake")


@pytest.fixture
def apart(monkeypatch, tmp_path):
    """Runs cases of these names in processes of their own, for so many s."""
    script = tmp_path / "standin.py"
    script.write_text(STANDIN % STAMP)
    monkeypatch.setattr(child, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(child, "START_S", 0.0)
    paths = [str(ROOT / "benchmarks"), str(ROOT / "src")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    def go(names: str, seconds: float) -> tuple[int, dict[str, frame.Row]]:
        monkeypatch.setenv("CASES", names)
        deadline = time.monotonic() + seconds
        status = child.run_apart("fake", tmp_path, deadline, lambda text: None)
        assert time.monotonic() < deadline + 5
        return status, frame.read(tmp_path, "fake")

    return go


def test_a_crash_is_its_case_s_and_the_rest_is_measured(apart):
    status, rows = apart("one crash fails two", 60.0)
    assert status == frame.DONE
    assert rows["crash"]["error"] == "its process ended with 9" and rows["crash"]["predicted"]
    assert rows["fails"]["error"] == "ValueError: no | such kernel"
    assert rows["one"]["measured"] and rows["two"]["measured"]


@pytest.mark.slow
def test_what_hangs_is_killed_begun_again_and_then_given_up(apart):
    for attempt in (1, 2):
        status, rows = apart("one hang two", 5.0)
        assert status == frame.LATER
        assert rows["hang"]["attempts"] == attempt and not frame.ended(rows["hang"])
    status, rows = apart("one hang two", 60.0)
    assert status == frame.DONE
    assert rows["hang"]["error"] == "TimeoutError: 2 calls ended before it did"
    assert rows["two"]["measured"]


def test_a_stage_that_cannot_begin_is_tried_in_the_next_call(apart):
    status, rows = apart("broken", 60.0)
    assert status == frame.FAILED
    assert rows == {child.WHOLE: {"error": "its process ended with 4"}}
    status, rows = apart("one", 60.0)
    assert status == frame.DONE and list(rows) == ["one"]


@pytest.mark.slow
def test_a_call_writes_the_table_and_says_how_it_ended(apart, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(frame, "STAGES", ("fake",))
    monkeypatch.setattr(table, "STAGES", ("fake",))
    out = tmp_path / "results"

    def called(names: str, *options: str) -> int:
        monkeypatch.setenv("CASES", names)
        return call.main(["--out", str(out), *options])

    assert called("one") == frame.DONE
    assert (out / "table.md").read_text() in capsys.readouterr().out
    assert called("one fails") == frame.FAILED
    assert "failed: fake: fails" in capsys.readouterr().out
    assert called("one", "--retry") == frame.DONE
    assert called("one hang", "--seconds", "5") == frame.LATER
    assert "call scripts/gpu again" in capsys.readouterr().out
    (out / "fake.json").write_text("{")
    assert called("one") == frame.USAGE
    assert "no rows of scripts/gpu" in capsys.readouterr().err


def test_the_table_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "STAGES", ("fake",))
    assert table.table(tmp_path) == "Nothing is measured.\n"
    beside = {"cuBLAS": {"value": 0.5, "low": 0.4, "high": 0.6}}
    note = "there is no description of it"
    rows = {
        "a": {
            "stamp": {**STAMP, "note": note},
            "predicted": {"seconds": 2e-6},
            "measured": {"seconds": 4e-6, "beside": beside, "mfu": 0.5},
        },
        "b": {"predicted": {"seconds": 1.0}, "error": "ValueError: a | b"},
        "c": {"predicted": {"flops": 1e12}},
    }
    frame.write(tmp_path, "fake", rows)
    text = table.table(tmp_path)
    assert text.startswith("card, 1, 2\n") and note in text
    wanted = "| fake | a | 2 us | 4 us | +100 % | cuBLAS 0.50x (0.40 to 0.60) | 50 % MFU |"
    assert wanted in text
    assert r"| fake | b | 1 s | error: ValueError: a \| b |  |  |  |" in text
    assert "| fake | c | 1e+12 FLOP/s | interrupted |  |  |  |" in text


def test_every_kernel_in_triton_is_measured():
    pytest.importorskip("triton")
    from gpu import pointwise, products
    from gpu.place import Place

    from shoal.kernel.dispatch import kernels_of, operators
    from shoal.machine.described import load

    place = Place("cpu", load("H200"), STAMP, Path(), Path())
    made = [*products.problems(place), *pointwise.problems(place)]
    measured = {make().call.op for _, make in made}
    assert measured == {op for op in operators() if "triton" in kernels_of(op)}


def test_wheels_are_complete():
    from packaging.requirements import Requirement

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    known = {*wheels.PACKAGES, *wheels.GIVEN}
    there = {plain(one.name): one for one in metadata.distributions()}
    mark = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.0"}
    missing = {}
    for name in wheels.PACKAGES:
        for text in (there[name].requires if name in there else None) or ():
            wanted = Requirement(text)
            counts = wanted.marker is None or wanted.marker.evaluate(mark)
            if counts and plain(wanted.name) not in known:
                missing[plain(wanted.name)] = name
    assert not missing
    project = metadata.distribution("shoal-ml").requires or ()
    core = [Requirement(text) for text in project]
    assert {plain(one.name) for one in core if one.marker is None} <= known


def dry(tmp_path: Path, *stages: str) -> None:
    """Run it, and see that it writes no result."""
    before = sorted((ROOT / "results").rglob("*"))
    environment = {**os.environ, "SHOAL_HOME": own_home(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "scripts" / "gpu"), "--dry-run", "--only", *stages]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for stage in stages:
        assert f"| {stage} | " in done.stdout
    assert done.stdout.endswith("dry run: the numbers above mean nothing\n")
    assert sorted((ROOT / "results").rglob("*")) == before


@pytest.mark.slow
def test_dry_run(tmp_path):
    pytest.importorskip("triton")
    dry(tmp_path, *(one for one in frame.STAGES if one != "decode"))


@pytest.mark.slow  # transformers is imported
def test_dry_run_of_decoding(tmp_path):
    pytest.importorskip("transformers")
    dry(tmp_path, "decode")


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_told_what_to_do(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(ROOT / "scripts" / "gpu"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == frame.USAGE
    assert "sees no CUDA device; on a machine without one: scripts/gpu --dry-run" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["import sys; sys.exit(1)", "import os; os._exit(9)"])
def test_wheels_are_all_there_or_none(tmp_path, monkeypatch, text):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\ntouch \"$7/one.whl\"\nexec {sys.executable} -c '{text}'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(subprocess.CalledProcessError):
        wheels.download(tmp_path / "wheels")
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


@pytest.mark.slow  # an environment is made
def test_wheels_are_installed_without_a_network(tmp_path, monkeypatch):
    place = tmp_path / "wheels"
    place.mkdir()
    source = tmp_path / "small"
    source.mkdir()
    (source / "smallest.py").write_text("answer = 42\n")
    text = '[build-system]\nrequires=["hatchling"]\nbuild-backend="hatchling.build"\n'
    text += '[project]\nname="smallest"\nversion="1"\n'
    text += '[tool.hatch.build.targets.wheel]\ninclude=["smallest.py"]\n'
    (source / "pyproject.toml").write_text(text)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(place), str(source)], check=True)
    monkeypatch.setattr(wheels, "VENV", tmp_path / "venv")
    python = wheels.installed(place)
    code = "import smallest, json, torch; print(json.dumps(smallest.answer))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == 42
    begin = (tmp_path / "venv" / "wheels").stat().st_mtime_ns
    assert wheels.installed(place) == python
    assert (tmp_path / "venv" / "wheels").stat().st_mtime_ns == begin
