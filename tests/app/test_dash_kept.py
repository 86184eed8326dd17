"""The dashboard: checkpoints of a run, and its memory by tier."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
torch = pytest.importorskip("torch")

from dash_home import client_of, make_run, settings, step, write_events  # noqa: E402

from shoal.checkpoint.history import slowest  # noqa: E402
from shoal.checkpoint.store import Store  # noqa: E402
from shoal.cost.score import Score  # noqa: E402
from shoal.train.layout import RunDir  # noqa: E402
from shoal.train.runs import Events  # noqa: E402
from shoal.train.saves import checkpoints  # noqa: E402

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "runs" / "kept"
    make_run(Score(), place, report=False)
    store = Store(RunDir(place).checkpoints, keep=2)
    for number in (10, 20, 30):
        store.save(number, {"model.w": torch.full((7,), float(number))}, {})
        write_events(
            place,
            {"time": 5.0, "kind": "checkpoint", "step": number, "seconds": 0.25, "mode": "lazy"},
            more=True,
        )
    return place


def saves_of(place: Path):
    events = Events(place)
    events.refresh()
    return checkpoints(place, events)


def test_what_is_kept_and_what_is_not(root: Path) -> None:
    newest, middle, oldest = saves_of(root)
    assert [one.step for one in (newest, middle, oldest)] == [30, 20, 10]
    assert (newest.state, newest.stall_s, newest.files) == ("complete", 0.25, 1)
    assert newest.save is not None and newest.save.mode == "lazy"
    assert newest.nbytes is not None and newest.nbytes > 28
    assert (oldest.state, oldest.nbytes) == ("not kept", None)


def test_causes_add_up_and_failures_are_told(root: Path) -> None:
    write_events(
        root,
        {
            "kind": "checkpoint",
            "step": 30,
            "seconds": 9.0,
            "blocked_s": {"copy": 0.5, "plan": 0.25},
        },
        {"kind": "checkpoint_failed", "step": 40, "message": "the disk is full"},
        {"kind": "checkpoint", "step": 50, "seconds": "much"},
        more=True,
    )
    result = {one.step: one for one in saves_of(root)}
    assert result[30].stall_s == 0.75
    assert (result[40].state, result[40].message, result[40].stall_s) == (
        "failed",
        "the disk is full",
        None,
    )
    assert result[50].stall_s is None


def test_damage_is_told(root: Path, tmp_path: Path) -> None:
    folder = Store(RunDir(root).checkpoints).folder(30)
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    elsewhere = tmp_path / "elsewhere"
    shutil.move(Store(RunDir(root).checkpoints).folder(20), elsewhere)
    (RunDir(root).checkpoints / "step-00000020").symlink_to(elsewhere)
    newest, middle, _ = saves_of(root)
    assert newest.state == "damaged" and file.name in newest.message
    assert middle.state == "damaged" and "is a link" in middle.message


def test_the_page_of_a_run(root: Path, tmp_path: Path) -> None:
    more = [
        {**step(30 + n), "tier_bytes": {"device": (n + 1) * 1e6, "disk": 8e6, "<b>": "x"}}
        for n in range(3)
    ]
    write_events(root, *more, more=True)
    client = client_of(settings(tmp_path, runs=(root.parent,)))
    page = client.get("/runs").text
    address = page.split('href="/runs/')[1].split('"')[0]
    page = client.get(f"/runs/{address}").text
    assert "<h2>Checkpoints</h2>" in page and "not kept" in page and "250 ms" in page
    tiers = client.get(f"/runs/{address}/curves").json()["plots"][-1]
    assert (
        tiers["title"] == "Memory by tier"
        and "device 3.00 MB, disk 8.00 MB" in tiers["description"]
    )
    assert [line["values"] for line in tiers["series"]] == [[1.0, 2.0, 3.0], [8.0] * 3]


def test_phases_of_every_rank_are_shown_and_the_slowest_is_marked(root: Path) -> None:
    ranks = [
        {"plan": 0.001, "copy": 0.25, "write": 1.5},
        {"plan": 0.002, "copy": 0.125, "write": 1.0},
    ]
    write_events(root, {"time": 9.0, "kind": "checkpoint", "step": 30, "ranks_s": ranks}, more=True)
    far = {"kind": "checkpoint_level", "step": 30, "place": "s3://b", "state": "failed"}
    write_events(root, far, {**far, "message": "the server is <i>ill</i>"}, more=True)
    newest = saves_of(root)[0].save
    assert newest is not None
    assert tuple(share.phases_s for share in newest.ranks) == tuple(ranks)
    assert slowest(newest) == {"plan": 1, "copy": 0, "write": 0}
    home = settings(root.parents[1], runs=(root.parent,))
    address = re.search(r'href="/runs/([^"/]+)"', client_of(home).get("/runs").text)
    assert address is not None
    page = client_of(home).get(f"/runs/{address[1]}").text
    assert "by rank" in page and page.count("<strong>") >= 3
    assert "<title>Save of step 30, by rank and phase</title>" in page
    assert "s3://b: failed" in page and "<i>ill" not in page


def test_what_events_cannot_mean_is_left_out(root: Path) -> None:
    strange = {
        "kind": "checkpoint",
        "step": 30,
        "blocked_s": {"copy": "x"},
        "ranks_s": [{"plan": None}, {"write": [1]}],
        "ranks_spans_s": [{"plan": [2, 1]}, {"write": "x"}],
        "ranks_bytes": ["many", 5],
    }
    write_events(root, strange, {"kind": "checkpoint_level", "step": 30, "tries": {}}, more=True)
    newest = saves_of(root)[0].save
    assert newest is not None and newest.stall_s is None
    assert [share.spans_s for share in newest.ranks] == [{}, {}]
    assert [share.nbytes for share in newest.ranks] == [0, 5]
    home = settings(root.parents[1], runs=(root.parent,))
    address = re.search(r'href="/runs/([^"/]+)"', client_of(home).get("/runs").text)
    assert address is not None
    assert client_of(home).get(f"/runs/{address[1]}").status_code == 200
