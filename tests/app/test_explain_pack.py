"""``shoal explain pack``."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app


def pack(*words: str) -> Result:
    return CliRunner().invoke(app, ["pack", *words])


def test_a_type_is_explained() -> None:
    done = pack("hvector(47, 1, 131072, vector(13, 100, 128, byte))", "--count", "2")
    assert done.exit_code == 0, done.output
    assert "x 2" in done.output
    assert "100 x 13 x 47" in done.output
    assert "reference" in done.output
    sliced = pack("float32[256, 256, 256][:, 0, ::2]")
    assert "4 x 128 x 256 at strides 1, 8, 262,144" in sliced.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("vectr(1, 2, 3, byte)",), "vector"),
        (("vector(1, 2",), "not an expression"),
        (("float32[8][9]",), "index 9"),
    ],
)
def test_bad_input(words: tuple[str, ...], message: str) -> None:
    done = pack(*words)
    assert done.exit_code != 0
    assert message in str(done.exception)
