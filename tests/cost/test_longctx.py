"""Long context at the peak: counted operators, true bytes, limits, reductions, sessions."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest

from shoal.core.errors import ConfigError, PlanError
from shoal.core.parts import table
from shoal.cost import shapes
from shoal.cost.arithmetic import parameters
from shoal.cost.longctx.peak import ATTENTION, LongContext, LongModel, Peaks, lengths
from shoal.cost.longctx.picture import picture
from shoal.cost.longctx.reductions import (
    AXES,
    REDUCTIONS,
    ReductionChoice,
    choose,
    factor_of,
    reaching,
    reduced,
)
from shoal.cost.longctx.sessions import (
    PeakCost,
    Sessions,
    host_link_of,
    session_throughput,
    simulate_sessions,
)
from shoal.ir import ModelShape, SchedulerLimits
from shoal.machine.described import load

YI = shapes.find("Yi-34B-200K")
MODEL = LongModel.of(YI)
BIG = Peaks(name="big", flops=1e15, memory_bytes=2e11, bandwidth=4e12, link=5e10)


def setting(**changes: Any) -> LongContext:
    return LongContext(**{"model": MODEL, "device": BIG, **changes})


def test_a_prompts_flops_are_those_of_the_real_model() -> None:
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer

    for heads, kv_heads, tokens in ((4, 4, 96), (4, 2, 256), (4, 1, 511)):
        config = ModelConfig(
            vocab_size=160,
            hidden=64,
            num_layers=3,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=16,
            ffn_hidden=160,
            max_position=512,
        )
        model = Transformer(config).eval()
        counter = FlopCounterMode(display=False)
        # By products that the counter knows; it does not look into fused attention of a CPU.
        with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model(torch.zeros(1, tokens, dtype=torch.int64))
        ours = LongModel.of(config.shape(), precision="fp32")
        # Every token's logits are counted, and what the causal mask hides is too.
        counted = counter.get_total_flops() - 2 * (tokens - 1) * ours.last_params
        assert ours.prefill_flops(tokens, "unmasked") == pytest.approx(counted, rel=0.01)
        pairs = sum(range(1, tokens + 1))
        causal = 4 * ours.layers * ours.width * pairs
        linear = 2 * ours.params * tokens + 2 * ours.last_params
        assert ours.prefill_flops(tokens) == pytest.approx(linear + causal, rel=0.01)


def test_cache_bytes_are_those_of_the_real_cache() -> None:
    torch = pytest.importorskip("torch")
    from shoal.model.config import ModelConfig
    from shoal.serve.cache.paged import PagedCache

    config = ModelConfig(
        vocab_size=64,
        hidden=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden=64,
        max_position=64,
    )
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        cache = PagedCache(config, 8, 16, dtype=dtype)
        assert LongModel.of(config.shape(), precision=name).cache_bytes(8 * 16) == cache.nbytes


def test_the_papers_cache_and_weights() -> None:
    assert MODEL.cache_bytes(50_000) / 2**30 == pytest.approx(11.44, abs=0.01)
    assert MODEL.weight_bytes == 2 * parameters(YI)
    # In any dtype, weights and cache apart.
    other = LongModel.of(YI, precision="int8", kv="fp32")
    assert (other.weight_bytes, other.kv_bytes) == (parameters(YI), 2 * MODEL.kv_bytes)


def test_an_empty_context_costs_the_weights_once_for_the_batch() -> None:
    one = setting()
    weights = MODEL.weight_bytes / BIG.bandwidth
    assert one.decode_s(0) == pytest.approx(weights)
    assert one.decode_s(0, batch=7) == pytest.approx(weights)
    assert one.decode_s(1000, batch=3) == pytest.approx(
        (MODEL.weight_bytes + 3 * MODEL.cache_bytes(1000)) / BIG.bandwidth
    )
    # From so many tokens a step on, products take longer than weights.
    batch = one.compute_bound_tokens
    assert one.decode_s(0, batch=int(batch * 0.9)) == pytest.approx(weights)
    assert one.decode_s(0, batch=int(batch * 1.2)) > 1.1 * weights
    assert one.attention_share(one.critical_length) == pytest.approx(0.5)
    assert one.decode_s(one.critical_length) == pytest.approx(2 * weights)


def test_everything_is_monotone() -> None:
    contexts = lengths(1000, 3_000_000)
    assert contexts[0] == 1000
    assert contexts[-1] == 3_000_000
    for method in ("prefill_s", "decode_s", "switch_s"):
        results = [getattr(setting(), method)(S) for S in contexts]
        assert results == sorted(results), method
    sizes = [8e10, 1e11, 2e11, 4e11, 8e11]
    larger = [setting(device=replace(BIG, memory_bytes=size)) for size in sizes]
    held = [one.users(50_000) for one in larger]
    assert held == sorted(held)
    assert held[0] < held[-1]
    sessions = Sessions(users=40, document=30_000)
    per_hour = [session_throughput(one, sessions) for one in larger]
    assert all(after >= before for before, after in itertools.pairwise(per_hour))
    assert per_hour[-1] > 1.1 * per_hour[0]
    # Two devices hold more than twice as many: the weights are there once.
    pair = setting(device=Peaks.of(load("H200"), tp=2))
    assert pair.users(50_000) > 2.5 * setting(device=Peaks.of(load("H200"))).users(50_000)


def test_efficiencies_are_factors() -> None:
    slow = setting(compute_efficiency=0.5, memory_efficiency=0.25)
    assert slow.prefill_s(50_000) == pytest.approx(2 * setting().prefill_s(50_000))
    assert slow.decode_s(50_000) == pytest.approx(4 * setting().decode_s(50_000))


def test_a_window_bounds_cache_and_pairs() -> None:
    windowed = replace(MODEL, window=1024)
    assert windowed.cache_bytes(10**6) == windowed.cache_bytes(1024) == MODEL.cache_bytes(1024)
    tokens = 5000
    pairs = sum(min(place + 1, 1024) for place in range(tokens))
    attention = windowed.prefill_flops(tokens) - 2 * MODEL.params * tokens - 2 * MODEL.last_params
    assert attention == pytest.approx(4 * MODEL.layers * MODEL.width * pairs, rel=0.01)
    assert windowed.prefill_flops(1000) == MODEL.prefill_flops(1000)


def test_what_must_shrink_for_a_long_context_to_be_as_cheap() -> None:
    one = setting()
    needs = {need.number: need for need in one.needed(1_000_000, 4000)}
    assert needs["decode"].factor == pytest.approx(1 / 250)
    thinner = one.on(BIG)
    thinner = replace(thinner, model=replace(MODEL, kv_bytes=MODEL.kv_bytes / 250))
    for method in ("decode_s", "switch_s", "users"):
        assert getattr(thinner, method)(1_000_000) == pytest.approx(getattr(one, method)(4000))
    # No cache, however small, makes a prompt shorter.
    assert thinner.prefill_s(1_000_000) == one.prefill_s(1_000_000)
    assert needs["prefill"].of == "FLOP"
    assert needs["prefill"].factor * one.prefill_s(1_000_000) == pytest.approx(one.prefill_s(4000))


def test_reductions_multiply_and_are_bounded() -> None:
    assert {one.axis for one in REDUCTIONS.values()} == set(AXES)
    for name in REDUCTIONS:
        (one,) = choose([name])
        for tokens in (1.0, 4000.0, 1e7):
            assert 0 < factor_of([one], YI, tokens) <= 1, name
    chosen = choose(["share=3", "mqa", "evict=0.5", "bits=4"])
    assert factor_of(chosen, YI, 1e5) == pytest.approx(1 / 3 * 1 / 8 * 1 / 2 * 1 / 4)
    assert reduced(MODEL, chosen, YI, 1e5).kv_bytes == pytest.approx(MODEL.kv_bytes / 192)
    windowed = reduced(MODEL, choose(["window=1000", "bits=8"]), YI, 1e5)
    assert (windowed.window, windowed.kv_bytes) == (1000, MODEL.kv_bytes / 2)
    # A way states that it bounds what a token sees; its name says nothing.
    sink = replace(REDUCTIONS["window"], name="sink")
    assert reduced(MODEL, [ReductionChoice(sink, 1000)], YI, 1e5).window == 1000


def test_compositions_that_reach_are_the_smallest_that_do() -> None:
    one = setting()
    wanted = one.needed(1_000_000, 4000)[0].factor
    result = reaching(one, YI, long=1_000_000, short=4000)
    assert result
    for left, ways in result:
        assert left <= wanted
        assert left == pytest.approx(factor_of(ways, YI, 1_000_000))
        for drop in range(len(ways)):
            fewer = ways[:drop] + ways[drop + 1 :]
            assert factor_of(fewer, YI, 1_000_000) > wanted, "one of them is not needed"
    # Little is needed between lengths that are nearly the same: single ways are enough.
    assert all(len(ways) == 1 for _, ways in reaching(one, YI, long=8000, short=7000))


def scheduler_for(one: LongContext, sessions: Sessions) -> Any:
    block = 64
    held = int(one.users(1)) // block * block
    kv = table("kv").build({"name": "paged", "block_size": block}).build(held)
    limits = SchedulerLimits(
        max_running=sessions.users, max_step_tokens=2048, max_position=sessions.longest + 1
    )
    preemption = (
        table("preempt")
        .build("swap")
        .build(
            kv,
            limits,
            host_tokens=max(held, 2 * sessions.users * sessions.longest),
            link=host_link_of(one, block),
        )
    )
    return table("scheduler").build("fcfs").build(kv, limits, preemption), block


@pytest.mark.parametrize("users", [1, 6])
def test_sessions_by_closed_form_and_by_simulation(users: int) -> None:
    shape = shapes.find("Llama-3-8B")
    device = replace(BIG, memory_bytes=2 * parameters(shape) + 3.4 * 131072 * 6000)
    one = LongContext(model=LongModel.of(shape), device=device)
    sessions = Sessions(users=users, document=6000, rounds=3, answer=40, think_s=1.0)
    closed = session_throughput(one, sessions)
    scheduler, block = scheduler_for(one, sessions)
    simulated = simulate_sessions(one, sessions, scheduler, block_size=block)
    # The closed form is a bound: nobody ever waits in it where something is free.
    assert 0.6 * closed < simulated < 1.05 * closed
    assert not scheduler.requests


def test_the_simulators_steps_are_the_calculators() -> None:
    one = setting()
    cost = PeakCost(one)
    assert cost.seconds([(999, 1)]) == pytest.approx(one.decode_s(1000))
    assert cost.seconds([(0, 50_000)]) == pytest.approx(one.prefill_s(50_000))
    halves = cost.seconds([(0, 25_000)]) + cost.seconds([(25_000, 25_000)])
    assert halves == pytest.approx(one.prefill_s(50_000), rel=1e-3)


def test_the_picture_shows_every_device() -> None:
    devices = [setting(), setting(device=replace(BIG, name="bigger"))]
    drawn = picture(devices, lengths(4000, 1_000_000))
    root = ET.fromstring(drawn)
    assert len(root.findall(".//{*}polyline")) == 2 * 4
    assert "Yi-34B-200K on bigger" in drawn


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: setting(device=Peaks.of(load("L40S"))), r"68\.8 GB of weights.*over 2 of them"),
        (lambda: setting().prefill_s(0), "tokens = 0: expected a context of at least 1 token"),
        (lambda: setting().users(0), "at least 1 token"),
        (lambda: setting().decode_s(-1), "tokens = -1"),
        (lambda: setting().needed(10, 0), "at least 1 token"),
        (
            lambda: LongModel.of(YI, precision="fp7"),
            "precision = 'fp7': expected one of fp32, bf16",
        ),
        (lambda: LongModel.of(YI, kv="int3"), "kv = 'int3'"),
        (lambda: MODEL.prefill_flops(1, "half"), "attention = 'half': expected one of causal"),  # type: ignore[arg-type]
        (lambda: setting(compute_efficiency=1.5), r"compute_efficiency = 1.5: expected a fraction"),
        (lambda: setting(activation_bytes=-1), "activation_bytes = -1"),
        (lambda: replace(BIG, link=0.0), "device.link = 0.0: expected a number above 0"),
        (lambda: Peaks.of(load("H100"), tp=0), "tp = 0"),
        (lambda: Peaks.of(load("A100"), precision="fp8"), "peak_flops.fp8"),
        (lambda: lengths(0, 10), "tokens"),
        (lambda: lengths(10, 5), "tokens"),
        (lambda: choose(["windw"]), "did you mean 'window'"),
        (lambda: choose(["bits=32"]), "reduce.bits = '32'.*above 0, up to 16"),
        (lambda: choose(["evict=1.5"]), "up to 1"),
        (lambda: choose(["evict=x"]), "reduce.evict = 'x'"),
        (lambda: choose(["window", "evict"]), "both reduce tokens"),
        (lambda: Sessions(users=0, document=1), "sessions.users = 0"),
        (lambda: Sessions(users=1, document=1, think_s=-1), "think_s"),
        (
            lambda: session_throughput(setting(), Sessions(users=1, document=10**7)),
            "GB of cache for 10000000 tokens",
        ),
    ],
)
def test_bad_input(wrong: Any, message: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=message):
        wrong()


def test_more_experts_do_not_multiply_a_token() -> None:
    mixture: ModelShape = shapes.find("Mixtral-8x7B-v0.1")
    model = LongModel.of(mixture)
    assert model.params < 0.3 * parameters(mixture)
    assert model.weight_bytes == 2 * parameters(mixture)
    assert set(ATTENTION) == {"causal", "unmasked", "paper"}
