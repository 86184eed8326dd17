"""The timeline of a run: starts, faults, excluded places, and lanes of ranks, all bounded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from dash_home import beat, client_of, fly, make_run, settings, start, step, write_events
from starlette.testclient import TestClient

from shoal.app.dash import timeline as module
from shoal.app.dash.lanes import Lanes, LaneStay, PlaceHistory
from shoal.cost.score import Score
from shoal.train.runs import MAX_STORY, Events

pytestmark = pytest.mark.usefixtures("environment")


def fault(
    time: float, number: int, rule: str, rank: int | None, **more: object
) -> dict[str, object]:
    return {
        "time": time,
        "kind": "fault",
        "step": number,
        "rule": rule,
        "rank": rank,
        "place": rank,
        "seconds": 1.5,
        "seconds_of_start": 8.0,
        "message": f"rank {rank} <b>was lost</b>",
        **more,
    }


def restart(time: float, *places: int) -> dict[str, object]:
    return {"time": time, "kind": "restart", "places": list(places), "ranks": len(places)}


@pytest.fixture(scope="module")
def robust(home: Path) -> tuple[TestClient, str, Path]:
    """A run that lost a rank, took a spare, found a slow one and went on with fewer."""
    root = home / "runs" / "robust"
    identity = make_run(Score(home / "score.db"), root, end=None, report=False)
    begin = {**start(), "ranks": 4}
    slow = {"kind": "non_communication_slow", "place": "rank", "ranks": [1]}
    write_events(
        root,
        {**begin, "time": 100.0},
        *({**step(n), "time": 100.0 + n} for n in range(8)),
        fault(109.0, 7, "lost", 2),
        restart(109.5, 0, 1, 4, 3),
        {**begin, "time": 112.0},
        *({**step(n), "time": 108.0 + n} for n in range(5, 14)),
        fault(123.0, 13, "slow", 1, fault=slow),
        restart(123.5, 0, 4),
        {**begin, "ranks": 2, "time": 126.0},
        *({**step(n), "time": 114.0 + n} for n in range(13, 30)),
        {"time": 145.0, "kind": "end", "step": 30},
    )
    with (root / "events.jsonl").open("a") as file:
        file.write('{"time": 146.0, "kind": "fau')  # torn
    for rank in range(4):
        fly(root / "faults" / "1", rank)
        fly(root / "faults" / "2", rank, slow=1)
    for rank in range(2):
        fly(root / "ranks", rank, 2)
    client = client_of(settings(home))
    return client, f"/runs/{identity}/timeline", root


def test_starts_faults_and_places_are_told(robust: tuple[TestClient, str, Path]) -> None:
    client, address, _ = robust
    answer = client.get(address)
    assert answer.status_code == 200
    page = answer.text
    assert "3 starts" in page
    assert "place 2 excluded; a spare took over" in page
    assert "place 1 excluded; continued with 2 ranks" in page
    assert "✕ crash: excluded" in page
    assert "slow compute" in page
    assert "&lt;b&gt;was lost" in page
    assert "<b>was lost" not in page
    # A page of its own, linked from the run's; no style inside, which its policy forbids.
    assert "style=" not in page
    run = client.get(address.removesuffix("/timeline")).text
    assert f'href="{address}"' in run


def test_lanes_of_a_start_name_the_slow_rank(robust: tuple[TestClient, str, Path]) -> None:
    client, address, _ = robust
    page = client.get(address, params={"start": 2}).text
    assert "Ranks in start 2" in page
    assert "Steps 8 to 11" in page
    for rank in range(4):
        assert f">rank {rank}</text>" in page
    assert "◆ slow compute" in page
    assert "1.80×" in page or "1.7" in page
    assert 'class="tl-wait"' in page
    assert "waits for all_reduce gradients" in page
    last = client.get(address).text
    assert "Ranks in start 3" in last
    assert ">rank 2</text>" not in last


def test_zoom_keeps_to_what_is_recorded(robust: tuple[TestClient, str, Path]) -> None:
    client, address, _ = robust
    for query, steps in (
        ({"start": "2", "from": "3", "to": "5"}, "Steps 3 to 5"),
        ({"start": "2", "from": "0", "to": "999999"}, "Steps 0 to 11"),
        ({"start": "2", "from": "9", "to": "2"}, "Steps 2 to 2"),
        ({"start": "2", "from": "999", "to": "-1"}, "Steps 11 to 11"),
        ({"start": "77", "from": "x", "to": "²"}, "Steps 8 to 11"),
    ):
        page = client.get(address, params=query).text
        assert steps in page, query
    page = client.get(address, params={"start": "2", "from": "4", "to": "7"}).text
    links = re.findall(r'href="([^"]*from=[^"]*)"[^>]*>([^<]+)', page)
    assert [words for _, words in links] == [
        "‹ Earlier",
        "Later ›",
        "Zoom in",
        "Zoom out",
        "All recorded",
    ]
    shown = [client.get(href.replace("&amp;", "&")).text for href, _ in links]
    notes = ["Steps 0 to 3", "Steps 8 to 11", "Steps 5 to 6", "Steps 2 to 9", "Steps 0 to 11"]
    assert all(steps in page for steps, page in zip(notes, shown, strict=True))


def test_damaged_and_huge_records_are_told_and_left_out(
    robust: tuple[TestClient, str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, address, root = robust
    folder = root / "faults" / "1"
    fly(folder, 4, 6)
    fly(folder, 5, 6)
    (folder / "rank-4.flight").write_bytes(b"no flight at all")
    (folder / "rank-6.flight").symlink_to("/etc/hostname")
    monkeypatch.setattr(module, "_MAX_BYTES", 100_000)
    fly(folder, 5, 6)
    with (folder / "rank-5.flight").open("ab") as file:
        file.write(bytes(100_000))
    page = client.get(address, params={"start": 1}).text
    assert "rank-4.flight: left out" in page
    assert "rank-5.flight" in page
    assert "exceed the limit of this page" in page
    assert ">rank 3</text>" in page
    assert "rank-6" not in page


def test_many_steps_are_few_pieces(home: Path) -> None:
    root = home / "runs" / "long"
    identity = make_run(Score(home / "score.db"), root, end=None, report=False)
    fly(root / "ranks", 0, 1, steps=500)
    client = client_of(settings(home))
    page = client.get(f"/runs/{identity}/timeline", params={"from": 0, "to": 10**8}).text
    # Two records a step in a ring of 512; each kind at most one piece a pixel.
    assert "Steps 244 to 499" in page or "Steps 245 to 499" in page
    assert page.count("<rect") < 3 * 1000


def killed(score: Score, root: Path, *more: dict[str, object]) -> str:
    """A run that was killed twice and resumed, with what followed."""
    identity = make_run(score, root, end=None, report=False)
    begin = {**start(), "ranks": 2}
    write_events(
        root,
        {**begin, "time": 100.0},
        *({**step(n), "time": 101.0 + n} for n in range(8)),
        {**begin, "time": 200.0, "step": 5, "resumed": True},
        *({**step(n), "time": 196.0 + n} for n in range(5, 12)),
        {**begin, "time": 300.0, "step": 10, "resumed": True},
        *({**step(n), "time": 291.0 + n} for n in range(10, 14)),
        *more,
    )
    for rank in range(2):
        fly(root / "ranks", rank, 2)
    return f"/runs/{identity}/timeline"


def test_a_run_that_was_killed_and_resumed(home: Path, client: TestClient) -> None:
    end = {"time": 330.0, "kind": "end", "step": 30}
    address = killed(Score(home / "score.db"), home / "runs" / "resumed", end)
    page = client.get(address).text
    rows = re.findall(r'<tr>\s*<th scope="row"><a href="[^"]*start=(\d)(.*?)</tr>', page, re.DOTALL)
    assert [number for number, _ in rows] == ["1", "2", "3"]
    first, second, third = (row for _, row in rows)
    assert "✗</span> killed" in first and "0 to 7" in first and "resumed at step 5" in first
    assert "✗</span> killed" in second and "5 to 11" in second and "resumed at step 10" in second
    assert "finished" in third and "10 to 13" in third and "killed" not in third
    assert page.count("◆ 1: killed") == 1 and "It failed" not in page
    assert "Ranks in start 3" in page and ">rank 1</text>" in page
    old = client.get(address, params={"start": 1}).text
    assert "were replaced when the run was resumed" in old and ">rank 1</text>" not in old


def test_the_timeline_of_a_failed_run_shows_its_error(home: Path, client: TestClient) -> None:
    root = home / "runs" / "broken"
    fault_ = fault(310.0, 13, "lost", 1)
    address = killed(Score(home / "score.db"), root, fault_, {**start(), "time": 320.0})
    fly(root / "faults" / "1", 0, 2)
    beat(root, 30.0, rank=1)
    message = {"type": "RankError", "message": "out of <memory>"}
    for rank in range(2):
        (root / "ranks" / f"rank-{rank}.error").write_text(json.dumps(message))
    beat(root, 30.0)  # a rank that has left an error is not waited for
    page = client.get(address).text
    assert "4 starts" in page and "✗</span> failed" in page
    assert page.count("rank-0, rank-1: out of &lt;memory&gt;") == 2  # above, and in the table
    assert "✗</span> error" in page and "the run ended here" in page
    # The records of the third start are those of the first fault.
    third = client.get(address, params={"start": 3}).text
    assert "crash" in third and ">rank 0</text>" in third and ">rank 1</text>" not in third
    (root / "events.jsonl").unlink()  # it failed before its first event
    page = client.get(address).text
    assert "out of &lt;memory&gt;" in page and "has no events yet" in page


def test_marks_of_the_clock_differ(home: Path) -> None:
    for whole in (0.5, 4.0, 30.0, 5000.0, 4e5):
        stays = [LaneStay(0, 1000.0, 1000.0 + whole, "a start")]
        marks = re.findall(r'<text class="tl-note"[^>]*>([^<]+)<', PlaceHistory(stays).render())
        assert len(marks) == len(set(marks)) == 5
        lanes = Lanes(title="x", begin=0, end=int(whole * 1e9), lanes={0: []})
        marks = re.findall(r'<text class="tl-note"[^>]*>([^<]+)<', lanes.render())
        assert len(marks) == len(set(marks)) >= 4


def test_a_run_without_records_says_why(home: Path, client: TestClient) -> None:
    identity = make_run(Score(home / "score.db"), home / "runs" / "bare", report=False)
    page = client.get(f"/runs/{identity}/timeline").text
    assert "watch: {record: true}" in page
    assert "finished" in page
    assert client.get("/runs/none/timeline").status_code == 404


def test_the_story_of_a_long_run_is_bounded(tmp_path: Path) -> None:
    lines = [start(), *map(step, range(5000))]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = Events(tmp_path)
    events.refresh()
    assert [event["kind"] for event in events.story] == ["start", "step", "step"]
    assert events.story[-1]["step"] == 4999
    again = "".join(json.dumps(start()) + "\n" for _ in range(MAX_STORY + 5))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(again)
    events.refresh()
    assert len(events.story) == MAX_STORY
