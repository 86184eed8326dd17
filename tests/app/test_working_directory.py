"""A directory with a hostile name, text or module: nothing in it is run, nothing hangs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from shoal.machine.described import load

pytestmark = [pytest.mark.multi, pytest.mark.slow]

# `python -m shoal` searches the working directory itself, before Shoal runs; `shoal` does not.
SHOAL = str(Path(sys.executable).with_name("shoal"))
# Modules of the standard library and of packages that every child imports soon.
CANARIES = (
    *("json", "typing", "runpy", "ctypes", "socket", "threading", "queue", "random", "pickle"),
    *("multiprocessing", "subprocess", "copy", "tempfile", "numpy", "torch", "safetensors"),
)
SMALL = [
    *("--set", "seq_len=64", "--set", "global_batch=4", "--set", "threads=1", "--steps", "3", "-q"),
    # Stated, as the described machine has products of bf16 and the one of the test may not.
    *("--model", "shoal-0.3m", "--machine", "laptop", "--set", "precision=fp32"),
    *("--set", "evaluation.final=false"),
]


def shoal(*words: str, cwd: Path, timeout_s: float = 240.0, **variables: str) -> str:
    """Run the command in a directory; what it printed. It must end well."""
    done = subprocess.run(
        [SHOAL, *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
    )
    printed = (done.stdout + done.stderr).decode(errors="backslashreplace")
    assert "Traceback" not in printed, printed
    # 1 is an answer: something is missing here. A short sweep is saved, and too short for a model.
    short = words[:2] == ("probe", "gemm") and "saved" in printed and "sweep longer" in printed
    assert done.returncode in (0, 1) or short, printed
    return printed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that also holds modules, which write a file when they are imported."""
    place = tmp_path_factory.mktemp("model")
    shoal("train", *SMALL, "--dir", "run", cwd=place)
    directory = place / "run" / "export"
    for name in CANARIES:
        code = (
            f"open({str(directory / 'sang')!r}, 'a').write({name!r} + ' ')\nraise SystemExit(9)\n"
        )
        (directory / f"{name}.py").write_text(code)
    return directory


@pytest.mark.parametrize(
    "words",
    [
        ["train", *SMALL, "--ranks", "2", "--dir", "../trained"],
        ["model", "generate", ".", "--tokens", "2"],
        ["probe", "gemm", "-q", "--budget", "2", "--out", "../gemm.json"],
        ["bench", "serve", "--model", ".", "--requests", "4", "--anyway"],
        ["claims", "run", "redco", "--quick"],
        ["doctor"],
    ],
    ids=lambda words: words[0],
)
def test_a_verb_imports_nothing_from_where_it_is_called(model: Path, words: list[str]) -> None:
    place = model.parent.parent / "-".join(w.strip("./") for w in words[:2])
    shutil.copytree(model, place / "model")
    # A home with a machine, as a probe would have left it; nothing there is prepared.
    load("laptop").save(place / "home" / "machine.yaml")
    home = {"SHOAL_HOME": str(place / "home")} if words[0] == "bench" else {}
    shoal(*words, cwd=place / "model", **home)
    assert not (model / "sang").exists(), (model / "sang").read_text()


def test_serving_imports_nothing_from_where_it_is_called(model: Path) -> None:
    words = [SHOAL, "serve", ".", "--port", "0", "-q"]
    with subprocess.Popen(words, cwd=model, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
                assert answer.status == 200
        finally:
            process.terminate()
    assert process.returncode == 143
    assert not (model / "sang").exists(), (model / "sang").read_text()


def test_the_canaries_sing(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    code = f"open({str(tmp_path / 'sang')!r}, 'a').write('json')\n"
    (copy / "json.py").write_text(code)
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    subprocess.run([sys.executable, "-c", "import json"], cwd=copy, check=True, env=plain)
    assert (tmp_path / "sang").exists()


def test_a_run_in_a_directory_with_a_newline(tmp_path: Path) -> None:
    run = tmp_path / "a\nb ü%20#?"
    shoal("train", *SMALL, "--ranks", "2", "--dir", str(run), cwd=tmp_path, timeout_s=90)
    assert (run / "report.json").exists()


@pytest.mark.parametrize(
    ("prompt", "status"), [("\u00e9 \u6f22".encode(), 0), (b"\xff\xfe", 2)], ids=["utf-8", "bytes"]
)
def test_a_prompt_in_the_c_locale(model: Path, prompt: bytes, status: int) -> None:
    done = subprocess.run(
        [SHOAL, "model", "generate", str(model), "--prompt", prompt],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    assert b"Traceback" not in done.stderr
    if status:
        assert b"not UTF-8" in done.stderr
