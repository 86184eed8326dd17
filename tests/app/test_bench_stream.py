"""``shoal bench stream``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.bench import app
from shoal.core.errors import ConfigError
from shoal.core.native import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


def bench(*words: object) -> Result:
    return CliRunner().invoke(app, ["stream", "--quick", "--anyway", *map(str, words)])


def test_four_kernels_beside_c_and_the_probe(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    done = bench("--elements", 5000, "--out", file)
    assert done.exit_code == 0, done.output
    assert "of the probe" in done.output
    told = json.loads(file.read_text())
    assert told["elements"] == 5000
    assert list(told["bytes_per_s"]) == ["copy", "scale", "add", "triad"]
    for rates in told["bytes_per_s"].values():
        assert set(rates) == {"algorithms", "openmp_c", "ratio"}
        assert min(rates.values()) > 0
    again = json.loads(bench("--elements", 5000, "-o", "json").output)
    assert again["bytes_per_s"].keys() == told["bytes_per_s"].keys()


def test_a_wrong_file() -> None:
    done = bench("--out", "rates.txt")
    assert isinstance(done.exception, ConfigError)
    assert "a name in .json" in str(done.exception)
