"""``shoal bench compile`` and ``shoal bench planes``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.bench import app
from shoal.core.native import compiler
from shoal.kernel.planes.engines import ENGINES


def bench(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def test_text_of_a_program() -> None:
    done = bench("compile", "lowbit_matmul", "--set", "weight=uint3", "--set", "zeros=true")
    assert done.exit_code == 0, done.output
    assert 'extern "C" void lowbit_matmul(' in done.output
    assert "multishift" in done.output
    assert "p_zeros" in done.output
    other = bench("compile", "--emit", "ir", "--set", "weight=float6_e3m2", "--set", "rows=4")
    assert "Dot(a=%" in other.output
    assert "float6_e3m2" in other.output


def test_layouts_are_drawn() -> None:
    words = ("compile", "--emit", "layout", "--set", "weight=int5")
    done = bench(*words)
    assert done.exit_code == 0, done.output
    assert " uint8\n" in done.output
    assert "8 threads" in done.output
    assert "32 threads" in bench(*words, "--target", "cuda").output


def test_a_file_for_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "copy.cu"
    done = bench("compile", "stream_copy", "--emit", "cuda", "--out", out)
    assert done.exit_code == 0, done.output
    assert "__global__" in out.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compile", "lowbit_matmull"), "lowbit_matmul"),
        (("compile", "--emit", "ptx"), "cpp, cuda, ir or layout"),
        (("compile", "--set", "weigth=uint3"), "weight"),
        (("compile", "--set", "rows=two"), "a whole number"),
        (("compile", "--set", "zeros=1"), "true or false"),
        (("compile", "--target", "cuda"), "cpp is for the host"),
        (("planes", "--widths", "0x9"), "1 to 8"),
        (("planes", "--rows", "one"), "whole numbers"),
    ],
)
def test_bad_input(words: tuple[str, ...], message: str) -> None:
    done = bench(*words)
    assert done.exit_code != 0
    assert message in str(done.exception)


@pytest.mark.skipif(
    compiler() is None or all(engine.refuses() for engine in ENGINES.values()), reason="no engine"
)
def test_a_table_of_engines() -> None:
    words = ("--widths", "1x1", "--rows", "1", "--size", "64", "--buffers", "1", "--pairs", "3")
    done = bench("planes", *words, "--anyway", "--quiet", "-m", "laptop", "-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found[0]["engine"] == "torch bf16"
    assert sum(line["chosen"] for line in found) == 1
