"""After ``shoal doctor --build`` nothing is compiled: each call of the compiler is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from shoal.core.native import compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multi,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
]

SHOAL = str(Path(sys.executable).with_name("shoal"))


class Machine:
    """A directory with an empty home, and a compiler that writes down each of its calls."""

    def __init__(self, place: Path) -> None:
        self.place, self.log = place, place / "calls"
        script = place / "c++"
        script.write_text(f'#!/bin/sh\necho "$*" >> {self.log}\nexec {compiler()} "$@"\n')
        script.chmod(0o755)
        self.environment = {
            **os.environ,
            "CXX": str(script),
            "SHOAL_HOME": str(place / "home"),
        }

    def calls(self) -> list[str]:
        """What was compiled since the last look, one line each."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.write_text("")
        return lines

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [SHOAL, *words], cwd=self.place, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def complete(self, model: str) -> int:
        """Tokens of an answer of a server of this model."""
        words = [SHOAL, "serve", model, "--port", "0", "-q"]
        with subprocess.Popen(
            words, cwd=self.place, env=self.environment, text=True, stdout=subprocess.PIPE
        ) as server:
            try:
                url = server.stdout.readline().strip()
                body = {"model": model, "prompt": "word1 of", "max_tokens": 4, "temperature": 0}
                request = urllib.request.Request(
                    f"{url}/v1/completions",
                    json.dumps(body).encode(),
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=300) as answer:
                    return int(json.load(answer)["usage"]["completion_tokens"])
            finally:
                server.terminate()


def test_a_start_after_it_compiles_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    words = " ".join(f"word{number % 97} of {number * 31 % 101}" for number in range(30000))
    (tmp_path / "text.txt").write_text(words)
    built = json.loads(machine.run("doctor", "--build", "-o", "json"))
    assert {check["status"] for check in built if check["name"] == "compiler"} == {"ok"}
    first = machine.calls()
    # One call for each library, and the check of the compiler itself.
    assert len(first) == len(set(first)) == len([*(tmp_path / "home" / "native").glob("*.so")]) > 20
    machine.run("doctor", "--build")
    assert machine.calls() == []
    machine.run(
        *("train", "--machine", "laptop", "--model", "shoal-0.3m", "--ranks", "2"),
        *("--data", "text.txt", "--set", "seq_len=64", "--set", "global_batch=4", "--dir", "run"),
        *("--set", "precision=bf16", "--set", "threads=1", "--steps", "2", "-q"),
    )
    for precision in ("fp32", "bf16"):
        machine.run("model", "convert", "run/export", precision, "--dtype", precision)
        assert machine.complete(precision) == 4
    machine.run("probe", "-q")
    assert machine.calls() == []


def test_without_a_compiler_it_says_what_to_install_and_leaves_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.environment |= {"CXX": "", "PATH": str(tmp_path / "empty")}
    done = subprocess.run(
        [SHOAL, "doctor", "--build"], env=machine.environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "apt install g++" in done.stderr
    assert not list(tmp_path.glob("home/native/*.so"))
