"""``shoal explain compile`` and ``shoal explain planes``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app
from shoal.core.native import compiler
from shoal.kernel.planes.engines import ENGINES


def explain(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def test_text_of_a_program() -> None:
    done = explain("compile", "lowbit_matmul", "--settings", "{weight: uint3, zeros: true}")
    assert done.exit_code == 0, done.output
    assert 'extern "C" void lowbit_matmul(' in done.output
    assert "multishift" in done.output
    assert "p_zeros" in done.output
    other = explain("compile", "--emit", "ir", "--settings", "{weight: float6_e3m2, rows: 4}")
    assert "Dot(a=%" in other.output
    assert "float6_e3m2" in other.output


def test_layouts_are_drawn() -> None:
    words = ("compile", "--emit", "layout", "--settings", "{weight: int5}")
    done = explain(*words)
    assert done.exit_code == 0, done.output
    assert " uint8\n" in done.output
    assert "8 threads" in done.output
    assert "32 threads" in explain(*words, "--target", "cuda").output


def test_a_file_for_a_gpu(tmp_path: Path) -> None:
    done = explain("compile", "stream_copy", "--emit", "cuda", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "__global__" in (tmp_path / "stream_copy.cu").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compile", "lowbit_matmull"), "lowbit_matmul"),
        (("compile", "--emit", "ptx"), "'cpp', 'cuda', 'ir' or 'layout'"),
        (("compile", "--settings", "{weigth: uint3}"), "weight"),
        (("compile", "--settings", "{rows: two}"), "a whole number"),
        (("compile", "--settings", "{zeros: 1}"), "true or false"),
        (("compile", "--target", "cuda"), "cpp is for the host"),
        (("planes", "--machine", "laptop", "--widths", "0x9"), "1 to 8"),
        (("planes", "--machine", "laptop", "--rows", "one"), "whole numbers"),
    ],
)
def test_bad_input(words: tuple[str, ...], message: str) -> None:
    done = explain(*words)
    assert done.exit_code != 0
    assert message in str(done.exception)


@pytest.mark.skipif(
    compiler() is None or all(engine.refuses() for engine in ENGINES.values()), reason="no engine"
)
def test_a_table_of_engines() -> None:
    words = ("--widths", "1x1", "--rows", "1", "--size", "64", "--buffers", "1", "--pairs", "3")
    done = explain("planes", *words, "--anyway", "-m", "laptop", "-o", "json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)
    assert data[0]["engine"] == "torch bf16"
    assert sum(line["chosen"] for line in data) == 1
