"""Measured closed loops: rows read, completed or refused, and constants that runs give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from shoal.core.errors import ConfigError
from shoal.cost.kernels.serving_engines import ENGINES
from shoal.cost.published.rows import UnplayableError
from shoal.cost.published.silicon import SiliconRun, read_silicon, replay_silicon
from shoal.cost.published.silicon_calibration import fitted

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
        ENGINES["vllm"], kernels=1.1, sequence_s=3e-5, prompts=0.8, first_s=0.06, queue=0.1
    )
    own = [
        dataclasses.replace(run, tpot_s=run.loop.tpot(made), ttft_s=run.loop.ttft(made))
        for run in runs
        if run.engine == "vllm"
    ]
    # As many as the whole table has, beside which where a fit begins counts little.
    result = fitted(own * 20)["vllm"]
    assert result.kernels == pytest.approx(1.1, abs=0.04)
    assert result.first_s == pytest.approx(0.06, rel=0.2)
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
    assert errors[len(errors) // 2] < 0.13
    firsts = sorted(abs(run.loop.ttft(ENGINES[run.engine]) / run.ttft_s - 1) for run in runs)
    assert firsts[len(firsts) // 2] < 0.35
