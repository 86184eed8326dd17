"""The plan explorer plans by name alone, and says what is wrong with a question."""

from __future__ import annotations

import html
from pathlib import Path

import pytest
from starlette.testclient import TestClient

ASKED = {
    "model": "Qwen3-0.6B",
    "machine": "8xH100",
    "objective": "cost",
    "planner": "search",
    "seq_len": "1024",
    "global_batch": "64",
    "tokens": "1000000",
}


@pytest.mark.slow
def test_it_ranks_and_draws(client: TestClient) -> None:
    page = client.get("/explore", params=ASKED)
    assert page.status_code == 200
    text = html.unescape(page.text)
    assert "cheapest of" in text
    assert text.count("<svg") >= 2
    assert "memory per rank" in text
    assert 'value="Qwen3-0.6B"' in text
    assert "What if" not in text
    value = client.get("/explore", params={**ASKED, "what_if": "1"})
    assert "twice the devices" in value.text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "Qwen4-1T"}, "expected one of the"),
        ({"model": "../../etc/passwd"}, "expected one of the"),
        ({"machine": "/etc/passwd"}, "expected a name or a shorthand"),
        ({"machine": "machine.yaml"}, "expected a name or a shorthand"),
        ({"machine": "8192xH100"}, "at most 4096 devices"),
        ({"objective": "speed"}, "time, cost, energy"),
        ({"planner": "oracle"}, "search"),
        ({"seq_len": "-1"}, "expected a number such as 300M"),
        ({"seq_len": "1000000"}, "the longest sequence of Qwen3-0.6B"),
        ({"tokens": "many"}, "expected a number such as 300M"),
        ({"global_batch": "1000000"}, "a whole number from 1 to"),
        ({"machine": "<script>"}, "expected a name or a shorthand"),
    ],
)
def test_mistakes_are_said_on_the_page(
    client: TestClient, change: dict[str, str], told: str
) -> None:
    page = client.get("/explore", params={**ASKED, **change})
    assert page.status_code == 200
    assert told in html.unescape(page.text)
    assert "<script>" + change.get("machine", "") not in page.text


def test_a_model_directory_is_not_read(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    page = client.get("/explore", params={**ASKED, "model": str(tmp_path)})
    assert "expected one of the" in html.unescape(page.text)
