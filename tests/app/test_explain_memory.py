"""``shoal explain memory``: what it shows, and its status."""

from __future__ import annotations

import json

from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app
from shoal.core.errors import ConfigError
from shoal.core.sizes import human_bytes


def shoal(*words: str) -> Result:
    return CliRunner().invoke(app, ["memory", "shoal-16m", "-m", "1xRTX-4090", *words])


def test_table_and_status() -> None:
    result = shoal("--budget", "device=2GiB", "--seq-len", "256")
    assert result.exit_code == 0, result.output
    assert "fastest that fits: offload:" in result.stdout
    none = shoal("--budget", "device=1MiB", "--policy", "zero_infinity")
    assert none.exit_code == 1
    assert "none fits; the smallest device is" in none.stdout
    rows = json.loads(shoal("-o", "json").stdout)
    assert {"choice", "recompute", "tier_bytes", "step_s", "fits"} <= set(rows[0])
    refused = shoal("--budget", "x=1")
    assert isinstance(refused.exception, ConfigError)


def test_settings_of_the_job() -> None:
    result = shoal("--job", "{optimizer: muon}", "-o", "json")
    rows = json.loads(result.stdout)
    assert any("muon" in row["refused"] for row in rows)


def test_fuyou_explains_what_it_swaps() -> None:
    words = ("--policy", "fuyou", "--job", "{grad_clip: 0}", "--seq-len", "256", "--curve")
    shown = shoal(*words, "--budget", "device=2GiB,host=2GiB")
    assert shown.exit_code == 0, shown.output
    assert "step time and bottleneck" in shown.stdout
    data = json.loads(shoal(*words, "-o", "json").stdout)
    assert len(data["curve"]) == 9
    assert data["chosen"]["seconds"] <= min(point["seconds"] for point in data["curve"])
    assert data["ways"][0]["choice"] == "fuyou"
    assert f"swaps {human_bytes(data['chosen']['swapped'])}" in data["ways"][0]["notes"][0]
    refused = shoal("--curve")
    assert isinstance(refused.exception, ConfigError)
    assert "--policy fuyou" in str(refused.exception)
