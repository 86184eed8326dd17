"""Ways beyond the memory, beside each other."""

from __future__ import annotations

import pytest

from shoal.core.errors import ConfigError
from shoal.cost.shapes import resolve
from shoal.ir import TrainJob
from shoal.machine.described import load
from shoal.plan.memory.offload import budgets_of, ways

MIB = 2**20


def job(**changes):
    return TrainJob.model_validate(
        {"model": "shoal-16m", "seq_len": 256, "global_batch": 8, "microbatch": 4, **changes}
    )


def priced(budgets=None, only=None, machine="1xRTX-4090", **changes):
    wanted = job(**changes)
    return ways(wanted, resolve(wanted.model), load(machine), budgets=budgets or {}, only=only)


def test_every_part_is_there_and_the_order_is_by_time():
    from shoal.core.parts import table

    result = priced()
    assert {way.choice.split("(")[0] for way in result} == {"none", *table("offload")}
    times = [way.step_s for way in result if way.fits]
    assert times == sorted(times)
    assert min(times) > 0


def test_budgets_say_what_does_not_fit_and_reach_the_part():
    result = priced({"device": 256 * MIB})
    for way in result:
        assert way.refused or way.fits == (way.tier_bytes["device"] <= 256 * MIB)
    order = [(bool(way.refused), not way.fits) for way in result]
    assert order == sorted(order)
    assert any(way.beyond == ("device",) for way in result)
    small = priced({"device": MIB}, only="zero_infinity")
    assert all("device_budget 1.05 MB is below" in " ".join(way.notes) for way in small)


def test_a_part_that_refuses_says_why():
    result = priced(optimizer="muon")
    refused = [way for way in result if way.refused]
    assert refused
    assert all("muon" in way.refused for way in refused)
    assert refused == result[-len(refused) :]


def test_what_lies_on_the_host_of_a_gpu_is_not_free():
    result = {way.choice: way for way in priced() if way.recompute == "none"}
    away = next(way for name, way in result.items() if "param=host" in name)
    assert away.step_s > 1.05 * result["none"].step_s


def test_budgets_as_words():
    assert budgets_of("device=64MiB, host=1GiB") == {"device": 64 * MIB, "host": 1024 * MIB}
    assert budgets_of("") == {}
    for text, message in (
        ("gpu=1GiB", "tier=size of device, host, disk"),
        ("device=much", "'much' is no size"),
        ("device=0", "expected a size"),
        ("device", "is no size|expected a size"),
    ):
        with pytest.raises(ConfigError, match=message):
            budgets_of(text)
    with pytest.raises(ConfigError, match="expected one of"):
        priced(only="nowhere")
