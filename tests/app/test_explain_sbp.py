"""``shoal explain sbp`` on files of a user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.core.errors import ConfigError, PlanError, ShoalError

MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)

    def forward(self, x):
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.gelu(torch.cat([gate, value], dim=-1)))

def build():
    return Mlp(), [(8, 4, 32)]
"""


def run(folder: Path, text: str, *words: str) -> str:
    file = folder / "model.py"
    file.write_text(text)
    result = CliRunner().invoke(app, ["explain", "sbp", str(file), *words])
    if isinstance(result.exception, ShoalError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_shows_weights_boxing_and_operations(tmp_path: Path) -> None:
    shown = run(tmp_path, MODEL, "--mesh", "2x2", "--show", "--pin", "x=S(0),B")
    assert "up.weight" in shown
    assert "layer" not in shown
    assert "rms_norm" in shown
    assert "result: add B,B" in shown


def test_json_is_a_plan(tmp_path: Path) -> None:
    plan = json.loads(run(tmp_path, MODEL, "--mesh", "4", "--pin", "x=B", "-o", "json"))
    assert plan["mesh"] == [4]
    assert plan["placements"]["x"] == "B"


@pytest.mark.parametrize(
    ("text", "words", "error", "match"),
    [
        (MODEL, ["--pin", "x"], PlanError, "TENSOR=PLACEMENT"),
        (MODEL, ["--pin", "x=S(7)"], PlanError, "dimensions that a tensor"),
        (MODEL, ["--flops", "-1"], ConfigError, "flops_per_s"),
        ("x = 1", [], ConfigError, "a function that returns a module"),
        ("raise ValueError('no')", [], ConfigError, "ValueError: no"),
        ("def build(): return 1", [], ConfigError, "shape of each input"),
        (MODEL.replace("F.gelu(", "torch.fft.fft("), [], PlanError, "no placement is known"),
        (MODEL.replace("[(8, 4, 32)]", "[]"), [], PlanError, "one for each input"),
        (MODEL.replace("x + ", "x if x.sum() > 0 else "), [], PlanError, "cannot be traced"),
    ],
)
def test_bad_files_and_words_are_refused(
    tmp_path: Path, text: str, words: list[str], error: type[ShoalError], match: str
) -> None:
    with pytest.raises(error, match=match):
        run(tmp_path, text, "--mesh", "4", *words)
