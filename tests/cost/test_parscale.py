"""The parallel scaling law: planted numbers, the published tables, and what cannot be told."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from shoal.app.commands.explain import app
from shoal.core.errors import ConfigError
from shoal.cost.scaling.parscale import (
    PUBLISHED,
    ParallelLaw,
    StreamPoint,
    equal_loss,
    fit_parscale,
)
from shoal.cost.shapes import find
from shoal.machine.described import load

LAW = ParallelLaw(floor=1.1, scale=0.05, exponent=0.3, k=0.5)


def points(
    streams: tuple[int, ...] = (1, 2, 4), sizes: tuple[float, ...] = (2e8, 1e9, 4e9)
) -> list[StreamPoint]:
    return [StreamPoint(params=n, streams=p, loss=LAW.loss(n, p)) for p in streams for n in sizes]


def test_planted_numbers_are_found() -> None:
    result = fit_parscale(points())
    for name in ("floor", "scale", "exponent", "k"):
        assert getattr(result, name) == pytest.approx(getattr(LAW, name), rel=0.01)


@pytest.mark.parametrize(("corpus", "k", "exponent"), [("stack", 0.39, 0.19), ("pile", 0.33, 0.20)])
def test_the_published_tables_give_the_published_law(
    corpus: str, k: float, exponent: float
) -> None:
    assert len(PUBLISHED[corpus]) == 24
    result = fit_parscale(PUBLISHED[corpus])
    assert result.k == pytest.approx(k, abs=0.005)
    assert result.exponent == pytest.approx(exponent, abs=0.005)
    assert result.r2 > 0.997


def test_a_stream_is_worth_the_same_parameters_at_every_size() -> None:
    assert LAW.effective(1e9, 1) == 1e9
    assert LAW.loss(1e9, 4) == pytest.approx(LAW.loss(LAW.effective(1e9, 4)))


def test_what_cannot_be_told_is_said() -> None:
    with pytest.raises(ConfigError, match="at least 5"):
        fit_parscale(points()[:4])
    with pytest.raises(ConfigError, match="k, what a stream is worth"):
        fit_parscale(points(streams=(4,), sizes=(1e8, 2e8, 4e8, 1e9, 2e9)))
    with pytest.raises(ConfigError, match="alpha and A"):
        fit_parscale(points(streams=(1, 2, 3, 4, 8), sizes=(1e9,)))
    with pytest.raises(ValueError, match="streams"):
        StreamPoint(params=1e9, streams=0, loss=1.0)


def test_streams_cost_less_than_growing() -> None:
    shape, machine = find("Qwen2.5-1.5B"), load("1xH100")
    one, _, four, eight = equal_loss(LAW, shape, machine, params=1.6e9)
    assert one.memory_saved is None and one.dense_params == 1.6e9
    assert one.memory_bytes == one.dense_memory_bytes and one.step_s == one.dense_step_s
    for row in (four, eight):
        assert row.loss < one.loss
        assert row.memory_bytes < row.dense_memory_bytes and row.step_s < row.dense_step_s
    # More requests, more cache: streams lose their advantage.
    many = equal_loss(LAW, shape, machine, params=1.6e9, batch=256)[2]
    assert many.latency_saved is not None and four.latency_saved is not None
    assert many.latency_saved < four.latency_saved
    with pytest.raises(ConfigError, match="streams"):
        equal_loss(LAW, shape, machine, streams=(0,))


def test_the_command_compares_streams_with_dense_models():
    done = CliRunner().invoke(app, ["parscale", "--params", "1.6e9", "-o", "json"])
    rows = json.loads(done.stdout)["rows"]
    assert [row["streams"] for row in rows] == [1, 2, 4, 8]
    assert rows[-1]["dense_params"] > rows[0]["dense_params"] == pytest.approx(1.6e9)
    for words in (["--corpus", "x"], ["--params", "0"]):
        assert isinstance(CliRunner().invoke(app, ["parscale", *words]).exception, ConfigError)
