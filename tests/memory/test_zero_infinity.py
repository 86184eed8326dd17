"""ZeRO-Infinity: the same bits as without it, within its budgets."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from offload_runs import BUDGETS, config, job, run, same  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def offload(**options):
    return {"name": "zero_infinity", **BUDGETS, **options}


@pytest.mark.parametrize(
    ("options", "model", "changes"),
    [
        ({}, {}, {}),
        ({"param": "host", "optim": "disk"}, {"tied": True}, {"recompute": "full"}),
        ({"prefetch_numel": 0, "sub_group_numel": "16384"}, {"tied": True}, {"precision": "bf16"}),
        ({"param": "host", "optim": "host"}, {}, {"precision": "bf16", "recompute": "full"}),
        ({}, {"num_experts": 4, "top_k": 2, "family": "mixtral"}, {}),
        ({"act": "host"}, {}, {}),
        ({"act": "host"}, {"tied": True}, {"recompute": "full", "precision": "bf16"}),
        ({}, {}, {"optimizer": {"name": "adamw", "fused": False}, "dropout": 0.1}),
    ],
)
def test_one_rank_is_the_same_to_the_bit(options, model, changes, tmp_path):
    one = run(job(**changes), config(**model), tmp_path)
    tiers = run(job(offload=offload(**options), **changes), config(**model), tmp_path)
    same(one, tiers)
    assert tiers.peaks["device"] <= 8 * 2**20
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("placement", ["sharded", "owner"])
def test_two_ranks_are_one_that_adds_the_halves(placement, tmp_path):
    plain = {"optimizer": {"name": "adamw", "fused": False}, "grad_clip": 0}
    model = config(vocab_size=301, hidden=56, num_heads=4, num_kv_heads=2)
    one = run(job(**plain), model, tmp_path)
    two = run(job({"dp": 2}, offload=offload(placement=placement), **plain), model, tmp_path)
    for name, value in one.parameters.items():
        assert torch.equal(value, two.parameters[name]), name
    assert two.losses == pytest.approx(one.losses, rel=1e-6)


@pytest.mark.parametrize(
    "parallel",
    [
        {"dp": 2, "tp": 2, "sp": True},
        {"pp": 2, "dp": 2},
        {"cp": 2},
        {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    ],
)
def test_other_splits_are_what_they_are_without(parallel, tmp_path):
    model = config(num_layers=4, tied=True, qk_norm=True, family="qwen3")
    plain = run(job(parallel), model, tmp_path)
    tiers = run(job(parallel, offload=offload()), model, tmp_path)
    assert tiers.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, value in plain.parameters.items():
        torch.testing.assert_close(value, tiers.parameters[name], rtol=0, atol=1e-5)
