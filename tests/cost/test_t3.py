"""T3's simulator: conservation, closed forms, limits, and what contention costs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from shoal.app.commands.explain import app
from shoal.core.errors import ConfigError
from shoal.cost.t3.sublayers import (
    MODELS,
    PartialProduct,
    RingDevice,
    all_gather_s,
    compare,
    fuse,
    product_alone,
    reduce_scatter_s,
    sublayers,
)

SMALL = PartialProduct(tokens=1000, k=300, n=700, tp=4)


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [64, 1000])
def test_every_tile_gets_one_update_of_every_device(tp, tokens):
    product = PartialProduct(tokens=tokens, k=300, n=700, tp=tp)
    result = fuse(product)
    assert result.updates == (tp, tp)
    regions = result.triggers / (tp - 2) if tp > 2 else 0
    assert regions == int(regions)


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
def test_bytes_follow_the_closed_forms(tp):
    product = PartialProduct(tokens=1000, k=300, n=700, tp=tp)
    chunk = product.chunk_bytes
    result = fuse(product)
    assert result.product_writes == pytest.approx((tp - 1) * chunk)
    assert result.scatter_reads == pytest.approx((tp - 2) * chunk)
    assert result.scatter_writes == pytest.approx((tp - 1) * chunk)
    assert result.sent == pytest.approx((tp - 1) * chunk)
    both = compare(sublayers("", 128 * tp, 512, tp)[0])
    chunk = both.sublayer.product.chunk_bytes
    assert both.sequential.total - both.sequential.operand_reads == pytest.approx(
        (tp + 2 * tp - 1 + tp + 2 * (tp - 1)) * chunk
    )


def test_operands_that_fit_in_the_cache_are_read_once():
    _, read = product_alone(SMALL, bypass=True)
    assert read == pytest.approx(2 * 300 * (1000 + 700))
    _, again = product_alone(SMALL, RingDevice(cache_bytes=1e5, compute_units=4), bypass=True)
    assert again > read


def test_one_device_stands_for_equal_ones():
    alone = fuse(SMALL)
    every = fuse(SMALL, slow={0: 1.0})
    assert every == alone


def test_one_slow_device_holds_up_the_ring():
    every = fuse(SMALL, slow={2: 3.0})
    assert every.seconds > 1.3 * fuse(SMALL).seconds
    assert every.updates == (4, 4)


@pytest.mark.parametrize(("model", "tp"), [("T-NLG", 8), ("T-NLG", 16), ("GPT-3", 16)])
def test_never_faster_than_product_or_link_alone(model, tp):
    for layer in sublayers(model, *MODELS[model], tp):
        result = compare(layer)
        assert result.fused.seconds >= result.bound_s
        assert 1.0 < result.speedup < 1.6
        assert result.movement < 0


def test_contention_is_simulated_and_not_the_longer_of_both():
    """Balanced and with little arithmetic for each byte, both want the memory."""
    layer = sublayers("T-NLG", *MODELS["T-NLG"], 16)[1]
    result = compare(layer)
    assert result.fused.seconds > 1.02 * result.bound_s
    free = fuse(layer.product, RingDevice(dram_bandwidth=1e15))
    assert free.seconds < result.fused.seconds


def test_a_link_that_binds_is_never_idle():
    device = RingDevice(link_bandwidth=1e9, dram_bandwidth=1e15)
    result = fuse(SMALL, device)
    link = 3 * SMALL.chunk_bytes / 1e9
    assert link < result.seconds < 1.05 * link + result.product_s


def test_a_product_that_binds_hides_everything():
    device = RingDevice(link_bandwidth=1e15, dram_bandwidth=1e15, link_latency_s=0.0)
    assert fuse(SMALL, device).seconds == pytest.approx(
        product_alone(SMALL, device, bypass=True)[0], rel=1e-3
    )


def test_what_slows_memory_or_link_slows_the_layer():
    layer = sublayers("T-NLG", *MODELS["T-NLG"], 16)[1].product
    base = fuse(layer).seconds
    assert fuse(layer, RingDevice(update_cost=3.0)).seconds > base
    assert fuse(layer, RingDevice(link_bandwidth=40e9)).seconds > base
    assert fuse(layer, RingDevice(compute_units=40)).seconds > base
    turns = fuse(layer, RingDevice(policy="round_robin"))
    assert turns.product_s >= fuse(layer).product_s
    assert turns.updates == (16, 16)


def test_ring_collectives_in_closed_form():
    device = RingDevice(link_latency_s=0.0)
    chunk = SMALL.chunk_bytes
    assert all_gather_s(SMALL, device) == pytest.approx(3 * chunk / 75e9)
    assert reduce_scatter_s(SMALL, device) == pytest.approx(3 * chunk / 75e9 + 3 * chunk / 1e12)
    assert reduce_scatter_s(SMALL, device, near_memory=True) == pytest.approx(3 * chunk / 75e9)


def test_bad_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"t3\.tp = 1"):
        sublayers("", 64, 8, 1)
    with pytest.raises(ConfigError, match=r"t3\.hidden = 65"):
        sublayers("", 65, 8, 2)
    with pytest.raises(ConfigError, match=r"t3\.tokens = 1"):
        sublayers("", 64, 1, 2)
    with pytest.raises(ConfigError, match=r"t3\.tp = 1"):
        fuse(PartialProduct(tokens=8, k=8, n=8, tp=1))
    with pytest.raises(ConfigError, match=r"t3\.tokens = 3"):
        fuse(PartialProduct(tokens=3, k=8, n=8, tp=4))


def test_the_command_shows_and_prints():
    done = CliRunner().invoke(app, ["t3", "--hidden", "4256", "--tp", "8"])
    assert done.exit_code == 0, done.output
    assert "feed-forward output" in done.stdout
    words = ["t3", "--hidden", "1024", "--tp", "4", "--device", "{link_bandwidth: 1e10}"]
    done = CliRunner().invoke(app, [*words, "-o", "json"])
    data = json.loads(done.stdout)
    assert len(data) == 4
    assert all(layer["speedup"] > 1 and layer["fused"]["updates"] == [4, 4] for layer in data)
    done = CliRunner().invoke(app, ["t3", "--tp", "3"])
    assert isinstance(done.exception, ConfigError)
    done = CliRunner().invoke(app, ["t3", "--device", "{link: 1}"])
    assert "t3.device.link: no such key; there are compute_units" in str(done.exception)
