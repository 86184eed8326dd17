"""``shoal bench predictions`` with a false AIConfigurator, which the real worker loads."""

import csv
import json
import math
import os
import re
import sys
import time
from pathlib import Path

import pytest

from own_home import own_home
from shoal.claims.bench.predictions import comparison as compared
from shoal.claims.bench.predictions import peer
from shoal.core.errors import ConfigError, ServeError
from shoal.cost.published.scoreboard import score_training
from shoal.cost.published.silicon import read_silicon, replay_silicon
from shoal.cost.published.silicon_board import SiliconBoard, score_silicon_file
from shoal_command import shoal

API = """
import os, sys
from types import SimpleNamespace

def cli_estimate(model_path, system_name, *, backend_version, **asked):
    print("libraries talk")
    with open(os.environ["FALSE_LOG"], "a") as log:
        log.write(f"{os.getpid()} {model_path} {backend_version}\\n")
    if os.environ.get("FALSE_DIES") == str(len(open(os.environ["FALSE_LOG"]).readlines())):
        sys.stderr.write("loading\\nout of tables\\n")
        sys.stderr.flush()
        os._exit(3)
    if system_name == "h100_sxm":
        raise ValueError(f"no tables of '{system_name}' (ask for another)")
    if system_name == "gb200":
        return SimpleNamespace(ttft=float("nan"), tpot=1.0)
    return SimpleNamespace(ttft=100.0 + asked["isl"], tpot=20.0)
"""
DATABASES = "def get_latest_database_version(system, backend):\n    return f'latest of {backend}'\n"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter whose AIConfigurator is false."""
    for name, text in (("cli/api.py", API), ("sdk/perf_database.py", DATABASES)):
        file = tmp_path / "site" / "aiconfigurator" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    info = tmp_path / "site" / "aiconfigurator-0.12.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aiconfigurator\nVersion: 0.12.0\n")
    monkeypatch.setenv("FALSE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    return script(tmp_path / "python", f'PYTHONPATH={tmp_path}/site exec {sys.executable} "$@"')


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SiliconBoard:
    """Every hundredth row of the table, scored by constants as they are."""
    path = tmp_path_factory.mktemp("board") / "runs.csv"
    rows = read_silicon()[::100]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    board = score_silicon_file(path)
    scores = board.scores["model"]
    return SiliconBoard({"model": scores, "device": scores}, board.skipped, 0.5)


@pytest.fixture
def board(small: SiliconBoard, monkeypatch: pytest.MonkeyPatch) -> SiliconBoard:
    monkeypatch.setattr(compared, "score_silicon", lambda: small)
    return small


def asked(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().splitlines()


def middle(values: list[float]) -> float:
    values = sorted(values)
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


def test_errors_are_those_of_an_independent_computation(tmp_path, python, board):
    table = compared.compare(["serving"], python=python)
    found = {(e.quantity, e.runs, e.predictor): e for e in table.errors}
    scores = board.scores["model"]
    both = [s for s in scores if s.run.device not in ("h100_sxm", "gb200")]
    assert 0 < len(both) < len(scores)
    for name in ("model", "device"):
        ours = found["tpot", "all", f"Shoal, {name} left out"]
        assert ours.rows == len(scores)
        wanted = [abs(s.predicted["tpot"] - s.run.tpot_s) / s.run.tpot_s for s in scores]
        assert ours.median_error == pytest.approx(middle(wanted))
    wanted = [abs(0.02 - s.run.tpot_s) / s.run.tpot_s for s in both]
    theirs = found["tpot", "both", "AIConfigurator"]
    assert theirs.rows == len(both) and theirs.median_error == pytest.approx(middle(wanted))
    assert theirs.share_within_25 == pytest.approx(sum(w <= 0.25 for w in wanted) / len(wanted))
    assert sum(w <= theirs.p90_error + 1e-12 for w in wanted) == math.ceil(0.9 * len(wanted))
    first = [abs((0.1 + s.run.clients.prompt / 1e3) / s.run.ttft_s - 1) for s in both]
    assert found["ttft", "both", "AIConfigurator"].median_error == pytest.approx(middle(first))
    assert ("ttft", "all", "AIConfigurator") not in found
    place = f"{both[0].run.device}, {both[0].run.engine}"
    there = [s for s in both if f"{s.run.device}, {s.run.engine}" == place]
    assert found["tpot", place, "AIConfigurator"].rows == len(there)
    why = table.unanswered["serving, AIConfigurator"]
    devices = [s.run.device for s in scores]
    assert why["ValueError: no tables of …"] == devices.count("h100_sxm")
    assert sum(why.values()) == len(scores) - len(both)
    assert sum(table.unanswered["serving, Shoal"].values()) == board.skipped.total()
    assert table.seconds["serving, Shoal"] == pytest.approx(0.5 / len(scores))
    assert table.versions == {"AIConfigurator": "0.12.0"}
    assert {line.split(" ", 2)[2] for line in asked(tmp_path)} <= {
        f"latest of {engine}" for engine in ("vllm", "sglang", "trtllm")
    }


def test_answers_are_kept_and_damaged_lines_asked_again(tmp_path, python, board):
    first = compared.compare(["serving"], python=python)
    number = len(asked(tmp_path))
    notices: list[str] = []
    assert compared.compare(["serving"], python=python, notice=notices.append) == first
    assert len(asked(tmp_path)) == number and not notices
    file = tmp_path / "home" / "predictions" / "aiconfigurator.jsonl"
    lines = file.read_text().splitlines()
    assert len(lines) == number
    lines[0] = lines[0][:40]  # and the last line has no end, as after a kill
    lines[1] = json.dumps({"key": json.loads(lines[1])["key"], "answer": {"tpot_ms": 3}})
    lines[2] = '["no", "object"]'
    file.write_text("\n".join(lines)[:-10])
    again = compared.compare(["serving"], python=python, notice=notices.append)
    assert again.errors == first.errors
    assert len(asked(tmp_path)) == number + 4
    assert len(notices) == 1 and "4 damaged lines are ignored" in notices[0]
    compared.compare(["serving"], python=python)
    assert len(asked(tmp_path)) == number + 4


def test_a_peer_that_dies_says_why_and_the_rest_is_asked_later(
    tmp_path, python, board, monkeypatch
):
    monkeypatch.setenv("FALSE_DIES", "4")
    with pytest.raises(
        ServeError, match=r"(?s)process ended.*out of tables.*3 earlier answers are saved"
    ):
        compared.compare(["serving"], python=python, limit=12)
    assert len(asked(tmp_path)) == 4
    monkeypatch.delenv("FALSE_DIES")
    table = compared.compare(["serving"], python=python, limit=12)
    assert table.limit == 12
    assert len(asked(tmp_path)) == 4 + 12 - 3


def test_an_interruption_leaves_no_child(tmp_path, python, board):
    def interrupt(text: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compared.compare(["serving"], python=python, progress=interrupt)
    pid = int(asked(tmp_path)[0].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_rows_that_the_peer_cannot_answer_leave_those_of_shoal(python, small, monkeypatch):
    scores = [one for one in small.scores["model"] if one.run.device == "h100_sxm"]
    board = SiliconBoard({"model": scores, "device": scores}, small.skipped, 0.5)
    monkeypatch.setattr(compared, "score_silicon", lambda: board)
    table = compared.compare(["serving"], python=python)
    assert {(one.runs, one.rows) for one in table.errors} == {("all", len(scores))}
    assert table.unanswered["serving, AIConfigurator"] == {
        "ValueError: no tables of …": len(scores)
    }
    assert "serving, AIConfigurator" not in table.seconds


def test_wrong_interpreters_are_refused_with_the_fix(tmp_path, board, python):
    def failed(*words: object) -> str:
        done = shoal("bench", "predictions", "--rows", "serving", *words)
        assert done.returncode != 0 and "Traceback" not in done.stderr
        return re.sub(r"\s+", " ", done.stderr)

    assert "cannot be run (No such file or directory)" in failed("--python", tmp_path / "none")
    bare = failed("--python", sys.executable)
    assert "it has no AIConfigurator" in bare and "-m pip install aiconfigurator==0.12.0" in bare
    silent = script(tmp_path / "silent", "echo no Python here >&2")
    assert "the process ended; its last output: no Python here" in failed("--python", silent)
    loud = script(tmp_path / "loud", "echo 5; sleep 100")
    began = time.monotonic()
    assert "AIConfigurator: 5 is not a JSON object" in failed("--python", loud)
    assert time.monotonic() - began < 60


def test_bad_options_are_refused(tmp_path):
    for words, expected in (
        (("--rows", "inference"), "--rows = 'inference': expected serving or training"),
        (("--rows", "training", "--out", "table.csv"), "expected a name in .json"),
        (("--limit", "0"), "should be greater than or equal to 1"),
    ):
        done = shoal("bench", "predictions", *words)
        assert done.returncode != 0 and expected in re.sub(r"\s+", " ", done.stderr)


VENV = """
mkdir -p "$4/bin"
cp {python} "$4/bin/python"
"""


def test_an_environment_is_made_once_or_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    failing = script(tmp_path / "failing", "echo could not resolve host >&2; exit 1")
    maker = script(tmp_path / "maker", VENV.format(python=failing))
    monkeypatch.setattr(peer.sys, "executable", str(maker))
    with pytest.raises(
        ConfigError, match=r"could not resolve host; check pip's access to a package index.*--rows"
    ):
        peer.environment()
    working = script(tmp_path / "working", f'echo "$@" >> {tmp_path}/installed')
    script(maker, VENV.format(python=working))
    place = tmp_path / "home" / "peers" / "aiconfigurator-0.12.0"
    assert peer.environment() == peer.environment() == place / "bin" / "python"
    line = (tmp_path / "installed").read_text()
    assert line == (
        "-m pip install --quiet aiconfigurator==0.12.0 aiconfigurator-core==0.12.0\n"
    )  # once


def test_questions_are_what_was_priced():
    rows = {row["id"]: row for row in read_silicon()}
    replicated = next(r for r in rows.values() if r["attention_dp_size"] == "8.0")
    run = replay_silicon(replicated)
    own = peer.question(run)
    assert own["mode"] == "agg"
    assert own["batch_size"] == math.ceil(run.clients.number / 8)
    assert own["attention_dp_size"] == 8 and own["isl"] == int(replicated["isl"])
    apart = next(
        row
        for row in rows.values()
        if row["decode_num_workers"] not in ("", "1.0") and row["backend"] == "trtllm"
    )
    run = replay_silicon(apart)
    own = peer.question(run)
    assert own["mode"] == "disagg" and "ctx_tokens" not in own
    assert own["decode_num_workers"] == float(apart["decode_num_workers"])
    assert own["decode_tp_size"] == run.splits[0].tp
    assert own["prefill_moe_ep_size"] == run.splits[1].experts_over
    clients = own["decode_batch_size"] * run.splits[0].replicas * run.servers[0]
    assert (
        run.clients.number <= clients < run.clients.number + run.splits[0].replicas * run.servers[0]
    )
    oss = [
        r for r in rows.values() if r["model_path"] == "openai/gpt-oss-120b" and r["mode"] == "agg"
    ]
    formats = {r["system"]: peer.question(replay_silicon(r))["moe_quant_mode"] for r in oss[:300]}
    assert formats["b200_sxm"] == "w4a8_mxfp4_mxfp8" and formats["h100_sxm"] == "w4a16_mxfp4"
    four = next(r for r in rows.values() if r["gemm_quant_mode"] == "nvfp4" and r["mode"] == "agg")
    own = peer.question(replay_silicon(four))
    assert own["gemm_quant_mode"] == own["moe_quant_mode"] == "nvfp4"
    assert own["kvcache_quant_mode"] == "fp8"


def test_training_rows_as_json_and_as_text(tmp_path):
    file = tmp_path / "table.json"
    done = shoal("bench", "predictions", "--rows", "training", "--limit", "40", "--out", file,
                 "-o", "json", "--quiet")  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert table == json.loads(file.read_text())
    found = {one["predictor"]: one for one in table["errors"]}
    rows = [
        score_training().rows[number * len(score_training().rows) // 40] for number in range(40)
    ]
    ours = [abs(row.predicted / row.reported - 1) for row in rows]
    theirs = [abs(row.baselines["SimuMax"] / row.reported - 1) for row in rows]
    assert found["Shoal, publication left out"]["median_error"] == pytest.approx(middle(ours))
    assert found["in the style of SimuMax"]["median_error"] == pytest.approx(middle(theirs))
    assert found["in the style of Calculon"]["rows"] == 40
    assert set(table["seconds"]) == {
        "training, Shoal",
        *(f"training, in the style of {name}" for name in ("llm-analysis", "Calculon", "SimuMax")),
    }


def test_serving_rows_as_text(python, board):
    done = shoal("bench", "predictions", "--rows", "serving", "--python", python, "--quiet")
    assert done.returncode == 0, done.stderr
    for expected in (
        "Serving: absolute errors",
        "Shoal, device left out",
        "by device and engine: median errors",
        "No prediction",
        "AIConfigurator, median",
        "AIConfigurator 0.12.0",
    ):
        assert expected in done.stdout
