"""ZeRO-Infinity: the same bits as without it, within its budgets."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from offload_runs import BUDGETS, config, job, run, same  # noqa: E402

from shoal.core.errors import (  # noqa: E402
    DeviceMemoryError,
    MachineError,
    ShoalError,
    TierFullError,
)
from shoal.core.parts import table  # noqa: E402
from shoal.ir import Device, Machine, MemoryTier, Work  # noqa: E402
from shoal.memory.streaming.stream import ParameterStream  # noqa: E402
from shoal.memory.streaming.trace import PassTrace  # noqa: E402
from shoal.parallel.legal import check_split  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def offload(**options):
    return {"name": "zero_infinity", **BUDGETS, **options}


def small_machine():
    tier = MemoryTier(name="dram", capacity_bytes=2**34, read_bandwidth=1e10)
    return Machine(name="small", device=Device(name="cpu", kind="cpu", num_cores=2, memory=(tier,)))


@pytest.mark.parametrize(
    ("options", "model", "changes"),
    [
        ({}, {}, {}),
        ({"param": "host", "optim": "disk"}, {"tied": True}, {"recompute": "full"}),
        ({"prefetch_numel": 0, "sub_group_numel": "16384"}, {"tied": True}, {"precision": "bf16"}),
        pytest.param(
            {"param": "host", "optim": "host"},
            {},
            {"precision": "bf16", "recompute": "full"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {}, {"num_experts": 4, "top_k": 2, "family": "mixtral"}, {}, marks=pytest.mark.slow
        ),
        ({"act": "host"}, {}, {}),
        pytest.param(
            {"act": "host"},
            {"tied": True},
            {"recompute": "full", "precision": "bf16"},
            marks=pytest.mark.slow,
        ),
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
    ("options", "model"),
    [
        ({"param": "host", "optim": "host"}, {"tied": True}),
        pytest.param({"placement": "owner"}, {}, marks=pytest.mark.slow),
        pytest.param({"act": "host"}, {"tied": True}, marks=pytest.mark.slow),
    ],
)
def test_one_rank_short_of_memory_goes_on_with_the_others(options, model, tmp_path, monkeypatch):
    """Rank 0 alone lets go of all it can, at every use and in every step, and bits stay."""
    shape = config(num_layers=3, **model)
    wanted = job({"dp": 2}, offload=offload(device_budget="32MiB", **options))
    usual = run(wanted, shape, tmp_path)
    bring, gone = ParameterStream._bring, []

    def short(self, home):
        bring(self, home)
        if self.comm.rank == 0:
            there = [one for one in self.homes if one.flat is not None]
            self._make_room(2**50)
            gone.extend(one.name for one in there if one.flat is None)

    monkeypatch.setattr(ParameterStream, "_bring", short)
    same(usual, run(wanted, shape, tmp_path))
    assert gone


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"dp": 2, "tp": 2, "sp": True}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "vpp": 2, "schedule": "interleaved"}, marks=pytest.mark.slow),
    ],
)
def test_other_splits_are_what_they_are_without(parallel, tmp_path):
    model = config(num_layers=4, tied=True, qk_norm=True, family="qwen3")
    plain = run(job(parallel), model, tmp_path)
    tiers = run(job(parallel, offload=offload()), model, tmp_path)
    assert tiers.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, value in plain.parameters.items():
        torch.testing.assert_close(value, tiers.parameters[name], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_tiles_are_saved_as_what_they_are_cut_from(tmp_path):
    plain = run(job(), config(), tmp_path)
    tiled = run(job(offload=offload(tiling=3)), config(), tmp_path)
    assert tiled.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, value in plain.parameters.items():
        torch.testing.assert_close(value, tiled.parameters[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"shard": "zero1"}, "divides parameters over the data-parallel ranks itself"),
        ({}, {"compile": True}, "use compile: false"),
        ({}, {"optimizer": "muon"}, "optimizer muon looks at several elements"),
        ({}, {"optimizer": "lamb"}, "optimizer lamb looks at several elements"),
        ({}, {"parallel": {"pp": 2, "schedule": "zb_h1"}}, "expected nothing with schedule zb_h1"),
        ({"tiling": "auto"}, {"parallel": {"tp": 2}}, "use tiling: none"),
        ({"device_budget": "1 meter"}, {}, "1 meter' is no size"),
        ({"device_budget": 12}, {}, "device_budget = 12: expected at least 1MiB"),
        ({"sub_group_numel": 3}, {}, "sub_group_numel = 3: expected at least 16384"),
        ({"prefetch_numel": -1}, {}, "prefetch_numel = -1: expected 0 or more"),
        ({"tiling": 1}, {}, "tiling = 1: expected auto, none"),
        ({"min_efficiency": 2}, {}, "min_efficiency = 2"),
        ({"speed": 2}, {}, "speed: no such key"),
    ],
)
def test_what_does_not_go_together_is_one_error(options, changes, message, tmp_path):
    with pytest.raises(ShoalError, match=message):
        check_split(job(offload=offload(**options), **changes), config().shape())


def test_budgets_and_paths_that_cannot_do(tmp_path):
    def attempt(**options):
        run(job(offload=offload(**options)), config(), tmp_path, steps=1)

    with pytest.raises(TierFullError, match=r"staging buffers take .* a smaller sub_group_numel"):
        attempt(host_budget="1MiB", sub_group_numel=10**7)
    with pytest.raises(DeviceMemoryError, match=r"needs .* of 1.05 MB are free"):
        run(
            job(offload=offload(device_budget="1MiB"), global_batch=8, microbatch=8),
            config(),
            tmp_path,
        )
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(MachineError, match=r"cannot be written"):
        attempt(path=str(blocked / "inner"))


def test_budgets_that_nobody_gives_are_what_is_needed(tmp_path):
    away = {"name": "zero_infinity", "prefetch_numel": 0}
    tiers = run(job(offload=away), config(), tmp_path, steps=1)
    given = run(job(offload=offload(prefetch_numel=0)), config(), tmp_path, steps=1)
    assert tiers.peaks == given.peaks


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {"prefetch_numel": 0}),
        ({"recompute": "full"}, {"prefetch_numel": 0}),
        ({"precision": "bf16"}, {"param": "host", "prefetch_numel": 0}),
        ({}, {}),
        ({}, {"act": "host", "optim": "host"}),
    ],
)
def test_peaks_are_predicted(changes, options, tmp_path):
    model = config(hidden=128, ffn_hidden=384, num_layers=3, vocab_size=512, head_dim=32)
    wanted = job(offload=offload(**options), **changes)
    result = run(wanted, model, tmp_path, steps=2)
    part = table("offload").build(wanted.offload)
    outcome = part.estimate(Work(shape=model.shape(), job=wanted), small_machine()).memory_bytes
    for tier, peak in result.peaks.items():
        assert peak <= outcome[tier], tier
        assert peak >= (0.5 if tier == "device" else 0.9) * outcome[tier], tier


def test_what_is_used_again_soon_stays(tmp_path, monkeypatch):
    started: list[str] = []
    start = ParameterStream._start
    monkeypatch.setattr(
        ParameterStream, "_start", lambda self, home: (started.append(home.name), start(self, home))
    )

    def fetches(prefetch_numel):
        started.clear()
        result = run(job(offload=offload(prefetch_numel=prefetch_numel)), config(), tmp_path)
        return result, len(started)

    none, every = fetches(0)
    some, fewer = fetches(10**7)
    same(none, some)
    # In every step but the first, nothing is dropped between its forward and backward pass.
    passes = 2 * 2  # micro-batches of a step, there and back
    assert every > fewer >= every / passes
    assert some.peaks["device"] <= 8 * 2**20


def test_another_order_is_recorded_anew_with_one_warning():
    trace = PassTrace("train")
    a, b, c = "abc"

    def go(*items):
        trace.begin()
        ahead = []
        for item in items:
            trace.use(item)
            ahead.append("".join(trace.upcoming()))
        trace.end()
        return ahead

    assert go(a, b, c) == ["", "", ""]
    assert go(a, b, c) == ["bc", "c", ""]
    with pytest.warns(RuntimeWarning, match="another order"):
        assert go(a, c, b) == ["bc", "", ""]
    assert go(a, c, b) == ["cb", "b", ""]
    assert go(a, b) == [
        "cb",
        "",
    ]
    assert trace.violations == 2
    assert go(a, b) == ["b", ""]
