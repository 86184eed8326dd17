"""Every split equals one process: loss, gradients, norm and parameters after three steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel_splits import AXES, FOUR, config, job, pairs

from shoal.claims.lab.same_as_one import same_as_one
from shoal.core.errors import ShoalError
from shoal.core.traits import traits
from shoal.kernel.fused.choice import OPERATORS, choose
from shoal.parallel.pipeline import part
from shoal.plan.schedules import SCHEDULES

WHOLE = [name for name in SCHEDULES if "skips_stages" not in traits("schedule", name)]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@st.composite
def _splits(draw: st.DrawFn, most: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A legal split of 2, 4 or 8 ranks and the rest of a job that it allows."""
    left = draw(st.sampled_from([n for n in (2, 4, 8) if n <= most]))
    parallel: dict[str, Any] = {}
    for axis in draw(st.permutations(AXES))[:-1]:
        parallel[axis] = draw(st.sampled_from([n for n in (1, 2, 4, 8) if left % n == 0]))
        left //= parallel[axis]
    parallel[next(axis for axis in AXES if axis not in parallel)] = left
    tp, pp, dp = parallel["tp"], parallel["pp"], parallel["dp"]
    if tp > 1:
        parallel["sp"] = draw(st.booleans())
    if pp > 1:
        several = pp <= 4
        names = [
            name for name in WHOLE if several or "several_stages" not in traits("schedule", name)
        ]
        parallel["schedule"] = draw(st.sampled_from(names))
        parallel["vpp"] = 2 if "several_stages" in traits("schedule", parallel["schedule"]) else 1
    vocab = ["auto", "none"] + (["pp"] if pp > 1 else [])
    parallel["vocab"] = draw(st.sampled_from(vocab))
    if parallel["vocab"] == "pp":
        parallel["vocab_barriers"] = draw(st.sampled_from([1, 2]))
    if parallel["cp"] > 1:
        parallel["context"] = draw(st.sampled_from(["ring", "zigzag"]))
    parallel["order"] = "-".join(draw(st.permutations(AXES)))
    split = "splits_backward" in traits("schedule", parallel.get("schedule", "1f1b"))
    shards = ["replicated", "zero1"]
    if not split and parallel["vocab"] != "pp" and dp * parallel["cp"] > 1:
        shards += ["zero2", "zero3"]
    extra: dict[str, Any] = {
        "shard": draw(st.sampled_from(shards)),
        "recompute": draw(st.sampled_from(["none", "full", "stage"])),
        "dropout": draw(st.sampled_from([0.0, 0.2])),
        "kernel": draw(st.sampled_from([{}, dict.fromkeys(OPERATORS, "reference")])),
    }
    microbatches = pp * draw(st.sampled_from([1, 2]))
    extra["microbatch"] = draw(st.sampled_from([1, 2]))
    if tp > 1 and extra["microbatch"] * 16 // parallel["cp"] >= 4 * tp:
        parallel["overlap"] = draw(st.sampled_from(["none", "tile"]))
    extra["global_batch"] = dp * microbatches * extra["microbatch"]
    return parallel, extra


def _agrees(parallel: dict[str, Any], extra: dict[str, Any], **model: Any) -> None:
    documents = model.pop("documents", False)
    result = same_as_one(job(parallel, **extra), config(**model), documents=documents)
    assert result.same, f"{parallel} {extra} {model}: {result}"


@pytest.mark.parametrize("number", [1, 3, 10])
@pytest.mark.slow
def test_fused_kernels_in_every_split(number):
    parallel, extra = FOUR[number]
    model = config(qk_norm=True, family="qwen3")
    split = job(parallel, **extra, kernel=choose({}, model.shape(), "fp32"))
    result = same_as_one(split, model, dtype=torch.float32)
    assert result.same, f"{parallel} {extra}: {result}"


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_splits(4), st.booleans(), st.booleans())
@pytest.mark.slow
def test_random_splits(split, tied, documents):
    parallel, extra = split
    _agrees(parallel, extra, tied=tied, documents=documents)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_splits(8), st.booleans(), st.booleans(), st.sampled_from(["llama", "qwen3", "mixtral"]))
def test_many_random_splits(split, tied, documents, family):
    parallel, extra = split
    more: dict[str, Any] = {"qk_norm": True} if family == "qwen3" else {}
    if family == "mixtral":
        more = {"num_experts": 4, "top_k": 2}
    _agrees(parallel, extra, family=family, tied=tied, documents=documents, **more)


@pytest.mark.parametrize(
    ("parallel", "extra"),
    # The others by threads in longer runs: real ranks do all of them.
    [
        pytest.param(*case, marks=[] if i % 5 == 1 else pytest.mark.soak)
        for i, case in enumerate(FOUR)
    ],
    ids=str,
)
def test_listed_splits(parallel, extra):
    _agrees(parallel, extra, documents=True)


def test_the_list_covers_every_pair_of_axes():
    assert pairs([parallel for parallel, _ in FOUR]) == set(itertools.combinations(AXES, 2))


def test_single_precision():
    split = {"dp": 2, "tp": 2, "sp": True}
    result = same_as_one(job(split), config(), dtype=torch.float32)
    assert result.same, str(result)


@pytest.mark.parametrize(
    ("split", "model"),
    [({"tp": 2, "sp": True}, {}), ({"tp": 2}, {"family": "qwen3", "qk_norm": True})],
)
def test_a_norm_whose_gradient_is_not_summed_is_found(monkeypatch, split, model):
    monkeypatch.setattr(part, "sum_together", lambda _parameters, _comm: None)
    with pytest.raises(AssertionError, match=r"norm\.weight: ranks that hold the same"):
        same_as_one(job(split), config(**model))


def test_clipping_by_a_norm_that_counts_copies_is_found(monkeypatch):
    monkeypatch.setattr(part.SplitPart, "first_holder", lambda _self, _name: True)
    result = same_as_one(job({"tp": 2}), config())
    assert result.gradient < 1e-9
    assert result.norm > 1e-4
    assert not result.same


def test_tied_embeddings_whose_gradients_are_not_summed_are_found(monkeypatch):
    monkeypatch.setattr(part, "sum_together", lambda _parameters, _comm: None)
    with pytest.raises(AssertionError, match=r"embed\.weight"):
        same_as_one(job({"pp": 2}), config(tied=True))


@pytest.mark.parametrize(
    ("parallel", "extra", "said"),
    [
        ({"tp": 3}, {}, "parallel.tp = 3: expected a divisor of 16 heads and 8 key/value heads"),
        ({"pp": 16}, {}, "parallel.pp = 16: expected at most 8 stages"),
        ({"pp": 2, "vpp": 3, "schedule": "interleaved"}, {}, "parallel.vpp = 3"),
        ({"pp": 4, "vpp": 2, "schedule": "interleaved"}, {"global_batch": 12}, "microbatches"),
        ({"cp": 3}, {}, "seq_len"),
        ({"tp": 8, "sp": True}, {"seq_len": 10}, "20 tokens that tp = 8 divides"),
        ({"ep": 2, "dp": 2}, {}, "parallel.ep"),
        ({"pp": 2, "schedule": "zb_h1", "dp": 2}, {"shard": "zero3"}, "shard = zero3"),
        ({"pp": 2, "vocab": "pp", "dp": 2}, {"shard": "zero2"}, "replicated or zero1 with vocab"),
        ({"tp": 2}, {"optimizer": "muon"}, "whole matrices"),
        ({"tp": 2}, {"compile": True}, "compile"),
    ],
)
def test_a_split_that_cannot_run_is_refused_with_the_values_that_can(parallel, extra, said):
    with pytest.raises(ShoalError) as refusal:
        same_as_one(job(parallel, **extra), config())
    assert said in str(refusal.value)
