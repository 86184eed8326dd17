"""``shoal model`` as its user meets it: converting, comparing, listing across formats."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.store import Store
from shoal.model.config import ModelConfig
from shoal.parallel.tensor.slices import whole_shapes
from shoal_command import shoal

CONFIG = ModelConfig(
    family="llama",
    vocab_size=29,
    hidden=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    ffn_hidden=12,
    max_position=32,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    state = {}
    for name, shape in whole_shapes(CONFIG).items():
        values = torch.arange(float(math.prod(shape))).view(shape)
        state |= {f"model.{name}": values, f"optimizer.{name}.exp_avg": values / 2}
    meta = {"model": CONFIG.model_dump(mode="json")}
    Store(tmp_path / "run" / "checkpoints").save(4, state, meta)
    return tmp_path / "run"


def test_a_run_becomes_rank_files_and_is_whole_again(run: Path, tmp_path: Path) -> None:
    ranks, shared = tmp_path / "ranks", tmp_path / "shared"
    made = shoal(
        "model",
        "convert",
        run,
        ranks,
        "--to",
        "deepspeed",
        "--mesh",
        "dp=2,tp=2",
        "--set",
        "zero=3",
    )
    assert made.returncode == 0, made.stderr
    assert len(list(ranks.rglob("*optim_states.pt"))) == 4
    assert shoal("model", "convert", ranks, shared, "--to", "universal").returncode == 0
    same = shoal("model", "diff", run, f"universal:{shared}")
    assert (same.returncode, same.stdout.strip()) == (0, "30 tensors, 0 of them differ")
    rows = json.loads(shoal("model", "ls", shared, "-o", "json").stdout)
    assert {row["dtype"] for row in rows} == {"F32"}
    assert "valid universal: 30 tensors" in shoal("model", "verify", shared).stdout
    assert "valid deepspeed: 30 tensors" in shoal("model", "verify", ranks).stdout


@pytest.mark.slow
def test_differences_are_shown_and_make_the_status(run: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    assert shoal("model", "convert", run, small, "--dtype", "bf16").returncode == 0
    result = shoal("model", "diff", run, small, "-o", "json")
    assert result.returncode == 1
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    one = rows["model.embed.weight"]
    assert (one["kind"], one["a"], one["b"]) == ("dtype", "F32 29x8", "BF16 29x8")
    shown = shoal("model", "diff", run, small, "--all")
    assert "15 tensors" in shown.stdout
    assert "29x8" in shown.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("convert", "RUN", "OUT", "--to", "tar"), "--to = 'tar': expected one of shoal, hugg"),
        (("convert", "RUN", "OUT", "--to", "megatron", "--mesh", "tp=9"), "cannot be divided"),
        (("convert", "RUN", "OUT", "--to", "megatron", "--mesh", "tp"), "axes and sizes"),
        (("convert", "RUN", "OUT", "--to", "dcp", "--set", "x=1"), "no such key"),
        (("diff", "RUN", "OUT"), "no such directory"),
        (("diff", "RUN", "tar:OUT"), "'tar' is no format"),
    ],
)
def test_what_cannot_be_is_one_line(
    run: Path, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    given = [w.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for w in words]
    result = shoal("model", *given)
    assert result.returncode == 2
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_saves_of_a_run_as_tables_and_pictures(run: Path, tmp_path: Path) -> None:
    ranks = [{"plan": 0.25, "write": 1.0}, {"plan": 0.5, "write": 0.75}]
    spans = [{"write": [0.25, 1.25]}, {"write": [0.5, 1.25]}]
    event = {
        "kind": "checkpoint",
        "step": 4,
        "time": 1.0,
        "seconds": 2.0,
        "mode": "lazy",
        "blocked_s": {"plan": 0.25, "before_update": 0.5},
        "ranks_s": ranks,
        "ranks_spans_s": spans,
    }
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    picture, heat = tmp_path / "stalls.svg", tmp_path / "heat.svg"
    result = shoal("model", "stalls", run, "--svg", picture)
    assert result.returncode == 0, result.stderr
    assert "0.7500" in result.stdout and "before_update" in result.stdout and picture.exists()
    result = shoal("model", "timeline", run, "--heat", heat, "-o", "json")
    assert json.loads(result.stdout)["slowest"] == {"plan": 1, "write": 0} and heat.exists()
    assert "1.0000*" in shoal("model", "timeline", run).stdout
    refused = shoal("model", "timeline", run, "--step", "5")
    assert refused.returncode == 2 and "those that have: 4" in refused.stderr
    for word in ("stalls", "timeline"):
        refused = shoal("model", word, tmp_path)
        assert refused.returncode == 2 and "give the directory of a run" in refused.stderr


def test_a_checkpoint_at_a_glance(run: Path) -> None:
    data = json.loads(shoal("model", "inspect", run, "-o", "json").stdout)
    assert (data["step"], data["world"], data["balance"]) == (4, 1, None)
    assert data["groups"]["model"][0] == data["groups"]["optimizer"][0] == 15
    assert data["files"][0]["pieces"] == 30
    result = shoal("model", "inspect", run)
    assert "one rank" in result.stdout and "rank-00000.safetensors" in result.stdout
    refused = shoal("model", "inspect", run, "--step", "9")
    assert refused.returncode == 2 and "there are: 4" in refused.stderr
