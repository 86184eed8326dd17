"""Parallel blocks: the formula, every split, and their directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import same_as_one
from shoal.core.errors import ModelError
from shoal.ir import ModelShape
from shoal.model import huggingface
from shoal.model.config import ModelConfig
from shoal.model.initialise import init_weights
from shoal.model.rope import tables
from shoal.model.transformer import Transformer


def model() -> Transformer:
    made = Transformer(config(family="parallel")).double()
    init_weights(made, 0)
    return made


def test_a_block_adds_both_branches_of_one_norm() -> None:
    block: Any = model().blocks[2]
    x = torch.randn(2, 6, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cos, sin = tables(config(family="parallel"), 0, 6, torch.device("cpu"), torch.float64)
    normed = block.attention_norm(x)
    expected = x + block.attention(normed, cos, sin, None, None) + block.mlp(normed)
    assert torch.equal(block(x, cos, sin), expected)
    assert not hasattr(block, "mlp_norm")


@pytest.mark.parametrize(
    ("parallel", "more"),
    [
        pytest.param({"dp": 2}, {"shard": "zero1"}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "sp": True, "overlap": "tile"}, {}, marks=pytest.mark.slow),
        ({"tp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved"}, {"recompute": "full"}),
        pytest.param(
            {"pp": 2, "cp": 2, "schedule": "zb_h1"}, {"dropout": 0.2}, marks=pytest.mark.slow
        ),
    ],
)
def test_every_split_equals_one_process(parallel: dict[str, Any], more: dict[str, Any]) -> None:
    result = same_as_one(job(parallel, **more), config(family="parallel"))
    assert result.same, result


def test_its_directory_is_refused_by_others_and_read_here(tmp_path: Path) -> None:
    made = model().float()
    huggingface.write(tmp_path / "model", made)
    assert '"shoal_parallel"' in (tmp_path / "model" / "config.json").read_text()
    again = huggingface.read(tmp_path / "model")
    assert again.config.family == "parallel"
    for name, value in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_shape_asks_for_it() -> None:
    shape = config(family="parallel").shape()
    assert ModelConfig.from_shape(shape).family == "parallel"
    experts = ModelShape.model_validate(
        {**shape.model_dump(), "num_experts": 4, "top_k": 2, "expert_hidden": 32}
    )
    with pytest.raises(ModelError, match="num_experts"):
        ModelConfig.from_shape(experts)
