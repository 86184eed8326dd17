"""``shoal explain context`` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app
from shoal.core.config import parse
from shoal.core.errors import ConfigError
from shoal.ir.job import Parallel


def shoal(*words: object) -> Result:
    return CliRunner().invoke(app, ["context", *map(str, words)])


def ranked(*words: object) -> dict[str, Any]:
    done = shoal(*words, "-o", "json")
    assert done.exit_code == 0, done.output
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def test_ranks_the_ways_with_reasons_and_says_what_goes_into_a_job() -> None:
    done = shoal("--heads", 32, "--kv-heads", 8, "--links", "mesh")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    names = {row[1]: int(row[0]) for row in rows if row[0].isdigit()}
    assert names["ulysses"] == 1
    assert names["zigzag"] < names["tokenring"]
    assert "grouped queries: keys and values are the smaller load" in done.stdout
    assert "parallel: {cp: 4, context: ulysses}" in done.stdout
    assert done.stderr == ""


def test_many_key_value_heads_on_a_mesh_make_tokenring_lighter_than_a_ring() -> None:
    names = [row["name"] for row in ranked("--heads", 32, "--links", "mesh")["ranked"]]
    assert names.index("tokenring") < names.index("zigzag")


def test_half_duplex_is_warned_of() -> None:
    done = shoal("--links", "mesh", "--duplex", "half")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("warning: --duplex half")
    assert "tokenring gains nothing" in done.stdout
    assert "tokenring gains nothing" in ranked("--duplex", "half")["warnings"][0]
    assert ranked()["warnings"] == []


def test_computation_hides_messages_of_a_ring() -> None:
    words = ("--heads", 6, "--kv-heads", 6, "--tokens", "65536")
    hidden = ranked(*words, "--tflops", 1)["ranked"][0]
    assert (hidden["name"], hidden["exposed_s"]) == ("usp", 0.0)
    bare = next(row for row in ranked(*words)["ranked"] if row["name"] == "zigzag")
    assert bare["exposed_s"] == bare["seconds"] > 0


def test_what_cannot_be_comes_last_without_numbers() -> None:
    words = ("--heads", 6, "--kv-heads", 3)
    last = ranked(*words)["ranked"][-1]
    assert not last["possible"]
    assert "cannot be split" in last["reasons"][0]
    rows = [line.split() for line in shoal(*words).stdout.splitlines()]
    assert [row[1] for row in rows if row[:1] == ["-"]] == ["usp", "ulysses"]


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_what_goes_into_a_job_is_a_legal_value(kv_heads: int) -> None:
    for row in ranked("--heads", 8, "--kv-heads", kv_heads, "--cp", 8)["ranked"]:
        assert parse(Parallel, row["parallel"], where="test").cp == 8
    done = shoal("--heads", 8, "--kv-heads", kv_heads, "--cp", 8)
    line = next(text for text in done.stdout.splitlines() if text.startswith("in a job: "))
    given = yaml.safe_load(line.removeprefix("in a job: "))["parallel"]
    parse(Parallel, given, where="test")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--heads", 30, "--kv-heads", 8), ("--heads, --kv-heads", "multiple")),
        (("--heads", 0), ("heads = 0", "at least 1")),
        (("--kv-heads", 0), ("kv_heads", "= 0", "at least 1")),
        (("--head-dim", -1), ("head_dim = -1", "at least 1")),
        (("--cp", 1), ("cp = 1", "2 to 65536")),
        (("--tokens", 1001), ("--tokens = 1001", "1000 or 1008")),
        (("--tokens", "many"), ("tokens = 'many'", "such as 300M")),
        (("--links", "mehs"), ("links = 'mehs'", "'switch', 'mesh' or 'ring'")),
        (("--duplex", "both"), ("duplex", "'full' or 'half'")),
        (("--precision", "fp8"), ("precision", "'bf16' or 'fp32'")),
        (("--bandwidth", 0), ("--bandwidth", "above 0")),
        (("--latency", -1), ("--latency", "at least 0")),
        (("--tflops", "nan"), ("tflops = 'nan'", "finite")),
    ],
)
def test_errors_name_the_fix(words: tuple[object, ...], told: tuple[str, ...]) -> None:
    done = shoal(*words)
    assert isinstance(done.exception, ConfigError), done.output
    assert all(word in str(done.exception) for word in told), done.exception


@pytest.mark.slow
def test_is_a_command_with_examples_and_needs_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "explain", "context", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "shoal explain context --heads 32 --kv-heads 8 --links mesh" in done.stdout
    script = (
        "import sys; from shoal.app.commands.explain import app\n"
        "app(['context'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
