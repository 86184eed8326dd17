"""``shoal explain tune`` and ``shoal explain gemm``: what they show, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from own_home import own_home
from shoal.app.cli import app as whole
from shoal.app.commands.explain import app
from shoal.core.errors import ShoalError
from shoal.machine.described import load
from shoal.machine.probes.gemm import drawn
from shoal.machine.probes.gemm_table import GemmPoint, GemmTable, telling
from shoal.plan.tune.protocols import TuningResult


def shoal(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


SMALL = ("tune", "GPT-3 175B", "-m", "16xFrontier", "--trials", 24, "--fix", "vpp=1")


def test_shows_trials_and_what_mattered(tmp_path: Path) -> None:
    done = shoal(*SMALL, "--why", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "trials, best first" in done.output
    assert "contribution of each axis" in done.output
    assert "failed; the best reaches" in done.output
    assert len(TuningResult.load(tmp_path / "trials.yaml").trials) == 24


def test_json_has_everything() -> None:
    done = shoal(*SMALL, "-o", "json", "--weak", "1,2")
    raw = json.loads(done.stdout)
    assert raw["best"]["value"] > 0
    assert len(raw["trials"]) == 24
    assert [point["replicas"] for point in raw["weak"]] == [1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--fix", "tpp=1"), "tune.fix"),
        (("--fix", "tp"), "axis=value"),
        (("--tuner", "bayess"), "did you mean 'bayes'"),
        (("--trials", 0), "tune.trials = 0"),
        (("--surrogate", "tree"), "tune.surrogate"),
        (("--nodes", "12,,16"), "--nodes"),
        (("--fix", "pp=1", "--fix", "tp=1", "--fix", "recompute=none"), "is feasible"),
    ],
)
def test_refusals_say_what_would_be_right(words: tuple[object, ...], message: str) -> None:
    done = shoal(*SMALL, *words)
    assert isinstance(done.exception, ShoalError)
    assert message in str(done.exception)


def test_gemm_of_a_described_machine() -> None:
    done = shoal("gemm", 4096, 4096, 4096, "--dtype", "bf16", "-m", "H100")
    assert done.exit_code == 0, done.output
    assert "it was not swept" in done.output


@pytest.mark.slow
def test_gemm_of_a_described_host_takes_its_cores() -> None:
    def seconds(*more: object) -> float:
        raw = json.loads(
            shoal("gemm", 4096, 4096, 4096, "-m", "laptop", "-o", "json", *more).stdout
        )
        return float(raw[0]["seconds"]["value"])

    cores = load("laptop").device.num_cores or 1
    assert cores > 1
    assert seconds() == seconds("--threads", cores) < seconds("--threads", 1)
    more = shoal("gemm", 64, 64, 64, "-m", "laptop", "--threads", cores + 1).exception
    assert f"--threads = {cores + 1}: expected at most {cores}" in str(more)


@pytest.mark.slow
def test_gemm_sweep_then_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path))
    missing = shoal("gemm", 64, 64, 64)
    assert isinstance(missing.exception, ShoalError)
    assert "shoal probe gemm" in str(missing.exception)
    shapes = [shape for index in range(40) for shape in drawn(1, index, threads=1, largest=256)]
    points = tuple(
        GemmPoint(**s.model_dump(), seconds=t, low=t, high=t, repeats=5)
        for s, t in ((shape, 1e-6 + shape.flops / 1e9) for shape in shapes)
    )
    GemmTable(fingerprint=telling(), points=points).write(tmp_path / "gemm.jsonl")
    swept = CliRunner().invoke(whole, ["probe", "gemm", "--budget", "0.1", "-q", "-o", "json"])
    assert swept.exit_code == 0, swept.output
    assert json.loads(swept.stdout)["points"] >= len(points)
    raw = json.loads(shoal("gemm", 100, 100, 100, "--tiles", "-o", "json").stdout)
    assert len(raw) == 6
    assert all(one["seconds"]["low"] <= one["seconds"]["value"] for one in raw)
    shown = shoal("gemm", 64, 64, 64, "--threads", 1)
    assert "learnt from" in shown.output
    for words, message in (
        (("gemm", 0, 1, 1), "gemm.m = 0"),
        (("gemm", 1, 1, 1, "--dtype", "fp4"), "gemm.dtype"),
        (("gemm", 1, 1, 1, "--tiles", "--objective", "energy"), "--watts"),
        (("gemm", 1, 1, 1, "--objective", "beauty"), "gemm.objective"),
        (("gemm", 1, 1), "gemm.k: missing"),
    ):
        refused = shoal(*words)
        assert isinstance(refused.exception, ShoalError), refused.output
        assert message in str(refused.exception)
