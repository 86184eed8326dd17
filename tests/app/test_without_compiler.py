"""Where there is no compiler everything runs, slower, and the command says so once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.multi]

SHOAL = str(Path(sys.executable).with_name("shoal"))
SAID = "no C++ compiler found"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A directory, and an environment with an empty home and no program but a shell."""
    place = tmp_path_factory.mktemp("bare")
    (place / "bin").mkdir()
    (place / "bin" / "sh").symlink_to("/bin/sh")
    words = " ".join(f"word{number % 97} of {number * 31 % 101}" for number in range(30000))
    (place / "text.txt").write_text(words)
    kept = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC", "SHOAL_HOME")}
    return place, {**kept, "PATH": str(place / "bin"), "SHOAL_HOME": str(place / "home")}


def run(bare: tuple[Path, dict[str, str]], *words: str) -> tuple[str, str]:
    place, environment = bare
    done = subprocess.run(
        [SHOAL, *words], cwd=place, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


TRAIN = [
    *(
        "train",
        "--machine",
        "laptop",
        "--model",
        "shoal-0.3m",
        "--ranks",
        "2",
        "--data",
        "text.txt",
    ),
    *("--set", "seq_len=64", "--set", "global_batch=4", "--set", "threads=1", "--dir", "run", "-q"),
]


def test_the_whole_path(bare: tuple[Path, dict[str, str]]) -> None:
    place, environment = bare
    assert "fastest of" in run(bare, "plan", "train", "shoal-0.3m", "--machine", "laptop")[0]
    _, said = run(bare, *TRAIN, "--steps", "4", "--set", "checkpoint.every=2")
    assert said.count(SAID) == 1
    assert all(SAID not in log.read_text() for log in (place / "run" / "ranks").glob("*.log"))
    run(bare, *TRAIN, "--resume", "--steps", "6")
    steps = [json.loads(line) for line in (place / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in steps if e["kind"] == "start"] == [0, 4]
    assert [e["step"] for e in steps if e["kind"] == "checkpoint"][-1] == 6
    run(bare, "model", "verify", "run")
    run(bare, "model", "generate", "run/export", "--tokens", "2")
    words = [SHOAL, "serve", "run/export", "--port", "0", "-q"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=place, env=environment, text=True, **pipes) as server:
        try:
            url = server.stdout.readline().strip()
            body = {"model": "run", "prompt": "word1 of", "max_tokens": 3, "temperature": 0}
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 3
        finally:
            server.terminate()
        assert server.stderr.read().count(SAID) == 1
    assert not list((place / "home").glob("native/*.so"))
