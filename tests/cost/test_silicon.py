"""Measured closed loops: rows read, completed or refused, and constants that runs give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from shoal.core.errors import ConfigError
from shoal.cost.kernels.serving_engines import ENGINES
from shoal.cost.kernels.times import kernel_times
from shoal.cost.published.devices import gpu
from shoal.cost.published.rows import UnplayableError
from shoal.cost.published.silicon import SiliconRun, read_silicon, replay_silicon
from shoal.cost.published.silicon_calibration import fitted
from shoal.cost.serving.closed_loop import Clients, ClosedLoop, closed_loop
from shoal.cost.shapes import find
from shoal.cost.step_cost.accelerated import AcceleratedStepCost, Formats, ServingSplit

ROWS = read_silicon()


def row(**equal: str) -> dict[str, str]:
    """The first row with these cells, or some text in them."""
    return dict(next(r for r in ROWS if all(part in r[name] for name, part in equal.items())))


@pytest.fixture(scope="module")
def runs() -> list[SiliconRun]:
    """Every twentieth run that can be replayed."""

    def some() -> Iterator[SiliconRun]:
        for one in ROWS[::20]:
            try:
                yield replay_silicon(one)
            except UnplayableError:
                continue

    return list(some())


def test_all_rows_are_replayed_or_say_why_not() -> None:
    assert len(ROWS) == 4343
    with pytest.raises(UnplayableError, match="how many servers compute prompts"):
        replay_silicon(row(mode="disagg", decode_num_workers="") | {"decode_num_workers": ""})
    with pytest.raises(UnplayableError, match="tp = 72: expected a divisor of the 128 heads"):
        replay_silicon(row(system="gb200", tp_size="72"))
    with pytest.raises(UnplayableError, match="system = 'tpu'"):
        replay_silicon(row(mode="agg") | {"system": "tpu"})
    with pytest.raises(UnplayableError, match="model = 'someone/Nothing-1B'"):
        replay_silicon(row(mode="agg") | {"model_path": "someone/Nothing-1B"})
    contradictory = row(model_path="gpt-oss", mode="agg", tp_size="2.0") | {"moe_ep_size": "16"}
    with pytest.raises(UnplayableError, match=r"devices of an expert x 16.: expected 2"):
        replay_silicon(contradictory)


def test_degrees_that_count_devices_twice_are_read_as_one_node() -> None:
    run = replay_silicon(row(system="b200_sxm", tp_size="64.0", mode="agg"))
    assert "tp 8 x 1, experts over 8" in run.run
    assert run.filled == ("degrees count devices twice: 8 devices, experts over all",)


def test_refuses_a_file_without_its_columns(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "rows.csv"
    path.write_text("id,backend\nx,vllm\n")
    with pytest.raises(ConfigError, match="model_path"):
        read_silicon(path)


def test_more_clients_take_longer(runs: list[SiliconRun]) -> None:
    base = row(model_path="Llama-3.1-70B", backend="vllm", system="h200_sxm", mode="agg")
    engine = ENGINES["vllm"]
    ends = []
    for clients in ("1", "64"):
        changed = base["silicon_data_source"].split("silicon_concurrency=")[0]
        one = replay_silicon(
            base | {"silicon_data_source": f"{changed}silicon_concurrency={clients};"}
        )
        ends.append((one.loop.tpot(engine), one.loop.ttft(engine)))
    assert ends[0][0] < ends[1][0] and ends[0][1] < ends[1][1]


def test_a_fit_finds_the_constants_that_made_the_runs(runs: list[SiliconRun]) -> None:
    """Latencies made by an engine with constants of its own give these constants back."""
    made = dataclasses.replace(
        ENGINES["vllm"], kernels=1.1, sequence_s=3e-5, eager_s=1.5e-3, first_steps=9.0
    )
    own = [
        dataclasses.replace(run, tpot_s=run.loop.tpot(made), ttft_s=run.loop.ttft(made))
        for run in runs
        if run.engine == "vllm"
    ]
    # As many as the whole table has, beside which where a fit begins counts little.
    result = fitted(own * 20)["vllm"]
    assert result.kernels == pytest.approx(1.1, abs=0.04)
    assert result.eager_s == pytest.approx(1.5e-3, rel=0.2)
    assert result.first_steps == pytest.approx(9.0, rel=0.2)
    for run in own:
        assert run.loop.tpot(result) == pytest.approx(run.tpot_s, rel=0.12)


def test_the_shipped_constants_are_those_of_a_fit(runs: list[SiliconRun]) -> None:
    """A fit to a twentieth of the runs goes nowhere far from what all of them gave."""
    result = fitted(runs)
    for name in ("vllm", "sglang", "trtllm"):
        assert result[name].kernels == pytest.approx(ENGINES[name].kernels, abs=0.06)


def test_the_price_is_near_what_was_measured(runs: list[SiliconRun]) -> None:
    errors = sorted(abs(run.loop.tpot(ENGINES[run.engine]) / run.tpot_s - 1) for run in runs)
    assert len(errors) > 100
    assert errors[len(errors) // 2] < 0.11
    firsts = sorted(abs(run.loop.ttft(ENGINES[run.engine]) / run.ttft_s - 1) for run in runs)
    assert firsts[len(firsts) // 2] < 0.30


def loop(engine: str, clients: Clients, device: str = "H200", **split: int) -> ClosedLoop:
    """Llama-3.1-70B in eight bits on one server."""
    shape, own = find("Llama-3.1-70B"), ServingSplit(**(split or {"tp": 4}))
    cost = AcceleratedStepCost(gpu(device), shape, ENGINES[engine], own, Formats("fp8", "fp8"))
    return closed_loop(cost, clients)


def test_each_waits_for_half_of_the_others_in_the_first_of_its_rounds() -> None:
    few = loop("trtllm", Clients(64, 8192, 1024, spread=0.2))
    assert few.aligned == pytest.approx(0.1)
    once = loop("trtllm", Clients(64, 8192, 1024, spread=0.2, rounds=1))
    assert once.aligned == 1.0
    engine = ENGINES["trtllm"]
    prompt = engine.kernels * few.prompt_kernels_s + engine.wire * few.prompt_wire_s
    # Prompts that come at once delay the first token, and half of them no token after it.
    later = once.ttft(engine) - few.ttft(engine)
    shorter = few.tpot(engine) - once.tpot(engine)
    assert later == pytest.approx(0.45 * 64 * prompt - engine.first_steps * shorter)
    assert shorter == pytest.approx(0.45 * few.between * prompt)


def test_prompts_that_come_before_all_tokens_stay_together() -> None:
    equal = loop("sglang", Clients(64, 8192, 1024))
    drawn = loop("sglang", Clients(64, 8192, 1024, spread=0.2))
    assert equal.aligned == 1.0 > drawn.aligned > loop("vllm", Clients(64, 8192, 1024)).aligned


def test_lengths_that_are_drawn_are_shorter_in_the_mean() -> None:
    drawn, stated = (loop("vllm", Clients(8, 8192, 1024, spread=s)) for s in (0.2, 0.0))
    assert 0.85 < drawn.alone_s / stated.alone_s < 0.91


def test_requests_beyond_the_cache_wait_for_others_answers() -> None:
    engine = ENGINES["trtllm"]
    fits, waits = (loop("trtllm", Clients(n, 1024, 8192), tp=1) for n in (16, 256))
    assert fits.full == 0.0 and waits.full > 8192
    assert waits.own < 256
    assert waits.ttft(engine) > waits.full * fits.tpot(engine)


def test_a_step_with_prompts_takes_as_long_as_its_launches() -> None:
    engine = dataclasses.replace(ENGINES["vllm"], eager_s=1e-2)
    shape, split = find("Llama-3.1-8B"), ServingSplit()
    slow = AcceleratedStepCost(gpu("H200"), shape, engine, split)
    assert slow.seconds([(0, 600)]) == pytest.approx(1e-2 * shape.num_layers)
    # Neither tokens alone nor short prompts, both of which have recorded graphs.
    for recorded in ([(64, 1)] * 8, [(0, 500)]):
        assert slow.seconds(recorded) < 0.1 * 1e-2 * shape.num_layers
    # Hundreds of kernels of a long prompt run longer than the host needs for them.
    quick = AcceleratedStepCost(gpu("H200"), shape, ENGINES["vllm"], split)
    assert quick.seconds([(0, 8192)]) == pytest.approx(quick.hidden.seconds([(0, 8192)]))
    few = closed_loop(quick, Clients(4, 600, 512))
    slower = few.tpot(engine) - few.tpot(ENGINES["vllm"])
    assert 0 < slower < few.between * 1e-2 * shape.num_layers


def test_servers_of_prompts_that_are_too_few_keep_clients_waiting() -> None:
    engine = ENGINES["trtllm"]
    shape, formats = find("Llama-3.1-70B"), Formats("fp8", "fp8")
    cost = AcceleratedStepCost(gpu("H200"), shape, engine, ServingSplit(tp=4), formats)
    few, many = (
        closed_loop(cost, Clients(256, 8192, 256), cost, decoders=4, prefillers=n) for n in (1, 32)
    )
    assert many.queued == 0.0 < few.queued < 256
    assert few.own < many.own and few.ttft(engine) > 5 * many.ttft(engine)


def test_scales_by_block_are_not_those_of_a_tensor_unless_tokens_are_exchanged() -> None:
    times = kernel_times(gpu("B200"))
    sizes = (8192.0, 7168, 256, 8, 256, 1)
    assert times.experts("fp8_block", *sizes) > 1.3 * times.experts("fp8", *sizes)
    shape, formats = find("DeepSeek-V3"), Formats("fp8_block", "fp8_block", "fp8")
    exchanged = AcceleratedStepCost(
        gpu("B200"), shape, ENGINES["trtllm"], ServingSplit(1, 8, 1, 8), formats
    )
    kernels = {call.size.split()[0] for call in exchanged.kernels([(0, 8192)] * 8)[0]}
    assert {"form=fp8", "form=fp8_block"} <= kernels
