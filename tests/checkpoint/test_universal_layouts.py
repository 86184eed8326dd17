"""Pairs of layouts: a state that is cut for one and then for the other is the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_files import config, saved, state_of

from shoal.checkpoint.formats import FORMATS
from shoal.checkpoint.formats.transfer import open_any
from shoal.checkpoint.universal.protocols import RankLayout

SHAPES = st.fixed_dictionaries(
    {
        "num_kv_heads": st.sampled_from([4, 4, 8]),
        "queries": st.sampled_from([1, 2, 3]),
        "vocab_size": st.integers(5, 70),
        "ffn_hidden": st.sampled_from([4, 12]),
        "num_layers": st.integers(1, 2),
        "tied": st.booleans(),
        "kind": st.sampled_from(["llama", "qwen2", "qwen3", "mixtral"]),
    }
)


def model_of(drawn):
    kind, queries = drawn.pop("kind"), drawn.pop("queries")
    extra = {
        "qwen2": {"attention_bias": True},
        "qwen3": {"qk_norm": True},
        "mixtral": {"num_experts": 4, "top_k": 2},
    }.get(kind, {})
    heads = drawn["num_kv_heads"] * queries
    return config(family=kind, hidden=4, num_heads=heads, **drawn, **extra, head_dim=2)


@st.composite
def layouts(draw, num_layers, experts):
    """A format, its options and a mesh that the model can be cut for."""
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, num_layers))
    if draw(st.integers(0, 3)):
        zero = draw(st.integers(1, 3))
        return {"name": "deepspeed", "zero": zero}, RankLayout(
            dp=draw(st.integers(1, 5)), tp=tp, pp=pp
        )
    ep = draw(st.sampled_from([1, 2])) if experts else 1
    pp = pp if num_layers % pp == 0 else 1
    multiple = draw(st.sampled_from([1, 8, 128]))
    return {"name": "megatron", "multiple": multiple}, RankLayout(tp=tp, pp=pp, ep=ep)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=SHAPES, data=st.data())
def test_pairs_of_layouts(drawn, data):
    model = model_of(dict(drawn))
    # What survives a power cut is not asked here, and thousands of flushes take minutes.
    with mock.patch("os.fsync"), tempfile.TemporaryDirectory() as folder:
        cut_and_join(Path(folder), model, data)


def cut_and_join(root, model, data):
    saved(root / "store", model, moments=1)
    truth = state_of(model, moments=1)
    contents = open_any(root / "store")
    for number in range(2):
        kind, mesh = data.draw(layouts(model.num_layers, model.num_experts))
        place = root / str(number)
        FORMATS.build(kind).write(place, contents, mesh=mesh)
        contents = open_any(place)
        assert set(contents.names()) == set(truth)
        for name, tensor in truth.items():
            assert torch.equal(contents.tensor(name), tensor), (kind, mesh, name)
