"""``shoal explain decode --hetero``: which drafter, tree and layers go beside a host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.core.parts import table
from shoal.cost.shapes import resolve
from shoal.ir import ServeJob
from shoal.plan.trees.drafting import RowCosts

ONE = [[0.6, 0.1, 0.05, 0.01, 0.01], [0.5, 0.1], [0.45, 0.1], [0.4, 0.1], [0.4, 0.1], [0.4, 0.1]]
TWO = [[0.8, 0.1], [0.7, 0.1], [0.65, 0.1], [0.6, 0.1], [0.6, 0.1]]
MODEL = "Llama-2-7B"
SHAPE = resolve(MODEL)


def run(*words: str):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def drafter(place: Path, layers: int, right: object, **other: object) -> str:
    """The directory of a drafter, of which no more than the config is read."""
    config = {
        "name": "dovetail", "options": {"layers": layers}, "target": "x", "calibration": right,
        "vocab_size": SHAPE.vocab_size, "hidden": SHAPE.hidden,
    }  # fmt: skip
    place.mkdir()
    (place / "drafter.json").write_text(json.dumps(config | other))
    return str(place)


@pytest.fixture
def words(tmp_path, monkeypatch) -> list[str]:
    """Two drafters of a 7B target, whose steps were measured on a slow host."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    costs = RowCosts(rows=(1, 8, 64), seconds_of=(0.17, 0.2, 0.9))
    costs.write(tmp_path / "costs.json")
    drafters = [drafter(tmp_path / "one", 1, ONE), drafter(tmp_path / "two", 2, TWO)]
    return [
        "explain", "decode", *drafters, "--hetero", "--model", MODEL, "--context", "2000",
        "--costs", str(tmp_path / "costs.json"), "--draft-machine", "1xRTX-4090",
    ]  # fmt: skip


def found(*words: str) -> dict:
    shown = run(*words, "-o", "json")
    assert shown.exit_code == 0, shown.output + str(shown.exception)
    return json.loads(shown.output)


def test_the_best_is_a_snippet_that_a_serving_job_takes(words, tmp_path):
    result = found(*words, "--memory-cap", "4GiB", "--overlap")
    rows, best = result["rows"], result["best"]
    rates = [row["tokens_per_s"] for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert rows[0]["over_plain"] == pytest.approx(rates[0] * 0.17)
    assert rows[0]["layers"] == 2 and rows[0]["target_layers"] > 0
    assert {(row["layers"], row["target_layers"] > 0) for row in rows} == {
        (1, False), (1, True), (2, False), (2, True)
    }  # fmt: skip
    assert all(row["nbytes"] <= 4 << 30 for row in rows)
    job = ServeJob.model_validate({"model": MODEL, **best})
    assert (job.max_position, job.kv_tokens) == (2000, 2000)
    part = table("speculative").build(job.speculative)
    assert part.path == str(tmp_path / "two") == rows[0]["name"]
    assert (part.nodes, part.target_layers) == (rows[0]["nodes"], rows[0]["target_layers"])
    assert (part.memory_cap, part.draft_device, part.overlap) == (4 << 30, "cuda:0", True)
    assert 1 <= part.depth <= min(5, part.nodes)


def test_text_has_the_table_and_says_what_was_measured_and_what_estimated(words):
    shown = run(*words, "--memory-cap", "4GiB").output
    assert "over plain" in shown and "of 4.29 GB" in shown
    assert "verify: measured steps of the host" in shown
    assert "draft: estimated by the cost model for 1xRTX-4090" in shown
    assert "link: 8 GB/s and 20 us a message (--link-gb-s, --link-us)" in shown
    assert "tokens/s: follows from these; nothing was run" in shown
    assert "speculative decoding has not been measured with such a device" in shown
    snippet = yaml.safe_load("precision:" + shown.rpartition("precision:")[2])
    assert snippet["speculative"]["name"] == "dovetail"
    at = words.index("--costs")
    predicted = run(*words[:at], *words[at + 2 :], "-m", "laptop").output
    assert "verify: estimated by the cost model for laptop, bf16" in predicted
    assert "measured steps" not in predicted


def test_more_memory_takes_more_layers_and_a_small_one_leaves_drafters_out(words, tmp_path):
    small, large = (found(*words, "--memory-cap", cap) for cap in ("3GiB", "7GiB"))
    assert small["rows"][0]["target_layers"] < large["rows"][0]["target_layers"]
    assert small["rows"][0]["tokens_per_s"] < large["rows"][0]["tokens_per_s"]
    takes = {row["layers"]: row["nbytes"] for row in small["rows"] if not row["target_layers"]}
    result = found(*words, "--memory-cap", str(takes[1]))
    assert {row["layers"] for row in result["rows"]} == {1}
    assert result["left_out"] == {str(tmp_path / "two"): takes[2]}
    shown = run(*words, "--memory-cap", str(takes[1]))
    assert f"left out: {tmp_path / 'two'} takes {takes[2]} bytes" in shown.output


def test_bytes_on_the_way_are_those_of_the_messages_and_take_their_time(words):
    rows = found(*words, "--memory-cap", "4GiB", "--link-gb-s", "1", "--link-us", "100")["rows"]
    state = 2 * SHAPE.hidden
    for row in rows:
        crossed = 60 + 5 * row["nodes"] + row["tokens"] * (4 + state)
        messages = 3
        if row["target_layers"]:
            crossed += 40 + (1 + row["nodes"]) * (13 + state)
            messages = 5
        assert row["link_bytes"] == pytest.approx(crossed)
        assert row["link_s"] == pytest.approx(messages * 1e-4 + crossed / 1e9)


def test_where_nothing_pays_plain_decoding_is_advised(words, tmp_path):
    RowCosts(rows=(1, 64), seconds_of=(0.001, 0.064)).write(tmp_path / "costs.json")
    slow = [*words, "--memory-cap", "4GiB", "--link-us", "20000"]
    assert found(*slow)["best"] is None
    assert "leave speculative out" in run(*slow).output


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "medusa"}, "a drafter of kind medusa, and --hetero places those of kind"),
        ({"calibration": []}, "no calibration, so its acceptance rate is unknown; train it"),
        ({"hidden": 64}, "trained for hidden 64, but the target has 4096; give --model"),
        ({"target": "y"}, "trained for target y, but the target has x"),
        ({"tokenizer": "y"}, "trained for tokenizer y"),
    ],
)
def test_other_drafters_are_named(changed, message, words, tmp_path):
    other = drafter(tmp_path / "other", 1, ONE, **changed)
    shown = run(*words[:3], other, *words[4:])
    assert message in str(shown.exception)
    assert other in str(shown.exception)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--memory-cap", "100MiB"), "the smallest drafter takes"),
        (("--memory-cap", "much"), "'much' is no size"),
        (("--memory-cap", "0"), "--memory-cap = '0'"),
        (("--link-gb-s", "0"), "--link-gb-s = 0.0"),
        (("--link-us", "-1"), "--link-us = -1.0"),
        (("--context", "100000"), "--context = 100000: expected 1 to"),
        (("--requests", "2"), "expected 1 with --hetero"),
        (("--tree", "chain"), "grows its trees by its own confidence"),
    ],
)
def test_bad_options_are_named(more, message, words):
    assert message in str(run(*words, *more).exception)


def test_a_target_is_needed_and_the_options_are_of_hetero_alone(words):
    at = words.index("--model")
    assert "give --model" in str(run(*words[:at], *words[at + 2 :]).exception)
    assert "hetero" in str(run(*words[:3], "--link-us", "1").exception)
    assert "drafters = 2" in str(run(*words[:4]).exception)
