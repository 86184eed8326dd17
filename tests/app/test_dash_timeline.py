"""The timeline of a run: starts, faults, excluded places, and lanes of ranks, all bounded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from dash_home import client_of, make_run, settings, start, step, write_events
from starlette.testclient import TestClient

from shoal.app.dash import timeline as module
from shoal.cost.score import Score
from shoal.train.runs import MAX_STORY, Events
from shoal.train.watch.recorder import Recorder

pytestmark = pytest.mark.usefixtures("environment")

MS = 1_000_000


def fly(folder: Path, rank: int, world: int = 4, steps: int = 12, *, slow: int = -1) -> None:
    """What a rank records that computes 10 ms a step, or 18 where it is slow, and then sums."""
    folder.mkdir(parents=True, exist_ok=True)
    now = [0]
    recorder = Recorder(
        folder / f"rank-{rank}.flight", rank, world, capacity=512, clock=lambda: now[0]
    )
    comm = recorder.name("comm::" + ",".join(map(str, range(world))))
    op, tag = recorder.name("all_reduce"), recorder.name("gradients")
    longest = 18 if slow >= 0 else 10
    for number in range(steps):
        recorder.step = number
        base = 1 + number * (longest + 2)
        now[0] = base * MS
        with recorder.span("load"):
            now[0] += MS
        now[0] = (base + (18 if rank == slow else 10)) * MS
        entered = recorder.enter(comm, op, tag, seq=number + 1, nbytes=1 << 16)
        recorder.issued(entered)
        recorder.waited(entered)
        now[0] = (base + longest + 1) * MS
        recorder.left(entered)
    recorder.close()


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
    assert "place 1 excluded; went on with 2 ranks" in page
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
    assert "more than a page reads" in page
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
