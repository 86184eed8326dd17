"""``shoal explain autotp``: what it shows, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app
from shoal.core.errors import ShoalError
from shoal.plan.autotp.plan import TensorPlan

pytest.importorskip("transformers")


def shoal(*words: object) -> Result:
    return CliRunner().invoke(app, ["autotp", *map(str, words)])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    options = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    file.write_text(json.dumps(options))
    return file


@pytest.mark.slow
def test_shows_and_writes(config: Path, tmp_path: Path) -> None:
    out, styles = tmp_path / "plan.yaml", tmp_path / "tp_plan.json"
    done = shoal(config, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "LlamaForCausalLM on 2 ranks" in done.stdout
    assert "model.layers.*.self_attn.q_proj.weight" in done.stdout
    assert TensorPlan.load(out).tp == 2
    assert json.loads(styles.read_text())["model.layers.1.mlp.down_proj"] == "rowwise"
    data = json.loads(shoal(config.parent, "-o", "json").stdout)
    assert data["all_reduces"] == 5
    assert data["dtensor"]["lm_head"] == "colwise_gather_output"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tp", 3), "which 3 ranks cannot share"),
        (("--fallback", "none"), "'modules' or 'refuse'"),
    ],
)
def test_refuses_with_a_reason(config: Path, words: tuple[object, ...], said: str) -> None:
    done = shoal(config, *words)
    assert isinstance(done.exception, ShoalError), done.output
    assert said in str(done.exception)
