"""``shoal plan serve`` as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import shoal_command
from shoal.app.cli import app
from shoal.ir import ServePlan
from shoal.machine.described import load


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a described machine saved as the local one."""
    place = tmp_path_factory.mktemp("home")
    load("laptop").save(place / "machine.yaml")
    return place


def shoal(home: Path, *words: object, **environment: str) -> shoal_command.Completed:
    return shoal_command.shoal(
        "plan", "serve", *words, without=("SHOAL_DATA",), SHOAL_HOME=str(home), **environment
    )


@pytest.mark.slow
def test_shows_competing_plans_and_what_binds(home: Path) -> None:
    begin = time.monotonic()
    done = shoal(home, "Qwen3-8B", "--machine", "H100", "--rate", 20, "--requests", 50)
    assert time.monotonic() - begin < 30
    assert done.returncode == 0, done.stderr
    for words in (
        "fcfs paged bf16",
        "prefill_first paged bf16",
        "tok/s per device",
        "decode step",
        "seed 0",
    ):
        assert words in done.stdout
    assert "50 requests" in done.stdout


def test_writes_json_yaml_and_a_file(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    words = ("shoal-4m", "--requests", 8, "--set", "kv.block_size=32", "--out", out)
    as_json = shoal(home, *words, "-o", "json")
    assert as_json.returncode == 0, as_json.stderr
    plan = json.loads(as_json.stdout)
    assert plan["predicted"]["tokens_per_s"]["value"] > 0
    assert plan["job"]["kv"] == {"name": "paged", "block_size": 32}
    as_yaml = shoal(home, *words, "-o", "yaml")
    assert yaml.safe_load(as_yaml.stdout) == plan
    assert ServePlan.load(out).model_dump(mode="json", exclude_none=True) == plan


def test_reads_a_job_and_plans_with_what_it_names(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("job: serve\nmodel: shoal-4m\nscheduler: static\nworkload: code\n")
    done = shoal(home, path, "--requests", 5, "-o", "json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["job"]["scheduler"] == "static"
    assert plan["job"]["workload"] == {"name": "code", "requests": 5}


@pytest.mark.slow
def test_needs_no_torch(home: Path) -> None:
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError('torch is blocked', name='torch')\n"
        "sys.meta_path.insert(0, Block())\n"
        "sys.argv = ['shoal', 'plan', 'serve', 'shoal-4m', '--requests', '4']\n"
        "from shoal.app.cli import main\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "SHOAL_HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    assert "fcfs paged" in done.stdout


def test_says_what_would_fit(home: Path) -> None:
    done = shoal(home, "Qwen3-4B", "--precision", "fp32", "--set", "max_position=8192")
    assert done.returncode == 1
    assert "does not fit" in done.stdout
    assert "precision = bf16 would fit" in done.stdout


@pytest.mark.parametrize("words", [(), ("-o", "json"), ("-o", "yaml")])
def test_what_does_not_fit_exits_with_one(words: tuple[str, ...]) -> None:
    line = ["plan", "serve", "Llama-3-70B", "-m", "1xA100", "--no-compare", *words]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 1, done.output


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("Qwen3-14",), ("Qwen3-14B",)),
        (("shoal-4m", "-m", "9xZ80"), ("9xZ80",)),
        (("shoal-4m", "--workload", "chatt"), ("chat", "did you mean")),
        (("shoal-4m", "--scheduler", "best"), ("fcfs", "static")),
        (("shoal-4m", "--kv", "pages"), ("paged", "contiguous")),
        (("shoal-4m", "--rate", "-1"), ("workload.chat.rate = -1", "above 0")),
        (("shoal-4m", "--requests", "0"), ("1 to 10,000,000",)),
        (("shoal-4m", "--precision", "int4"), ("precision", "fp32")),
        (("shoal-4m", "--set", "max_position=9999"), ("2 to 2048",)),
        (("shoal-4m", "--set", "workload.scal=2"), ("scal", "did you mean")),
        (("shoal-4m", "--set", "kv_tokens=64"), ("serve with more kv_tokens",)),
        (("shoal-4m", "--workload", "azure"), ("SHOAL_DATA", "github.com/Azure")),
        (("shoal-4m", "--workload", "trace"), ("--trace FILE",)),
        (("shoal-4m", "--trace", "no.jsonl"), ("no.jsonl", "no such file")),
        (("nowhere.yaml",), ("nowhere.yaml", "cannot be read")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_refuses(home: Path, words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    done = shoal(home, *words)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr
