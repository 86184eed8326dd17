"""``shoal explain stream``."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app
from shoal.core.errors import ConfigError
from shoal.core.native import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


def stream(*words: object) -> Result:
    return CliRunner().invoke(app, ["stream", "--quick", "--anyway", *map(str, words)])


def test_four_kernels_beside_c_and_the_probe() -> None:
    done = stream("--elements", 5000)
    assert done.exit_code == 0, done.output
    assert "of the probe" in done.output
    data = json.loads(stream("--elements", 5000, "-o", "json").output)
    assert data["elements"] == 5000
    assert list(data["bytes_per_s"]) == ["copy", "scale", "add", "triad"]
    for rates in data["bytes_per_s"].values():
        assert set(rates) == {"algorithms", "openmp_c", "ratio"}
        assert min(rates.values()) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--elements", 0), "elements = 0"), (("--elements", 9, "--out", "."), "writes no files")],
)
def test_bad_input(words: tuple[object, ...], message: str) -> None:
    done = stream(*words)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
