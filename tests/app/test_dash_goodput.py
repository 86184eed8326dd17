"""The goodput explorer: one bounded search at a time, and a server's point beside its curves."""

from __future__ import annotations

import html
import threading
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from dash_home import client_of, settings
from starlette.testclient import TestClient

from shoal.app.dash import goodput
from shoal.app.dash.goodput import FAMILIES, GoodputSearch, GoodputSearches, measured, show
from shoal.core.parts import Choice
from shoal.cost.workloads import WORKLOADS
from shoal.ir import Phase, ServeJob
from shoal.plan.serving.goodput import Slo
from shoal.plan.serving.goodput_report import DisaggSetting, GoodputReport, SettingResult
from shoal.serve.watch.scrape import Scrape
from shoal.serve.watch.upstream import ServerHealth

pytestmark = pytest.mark.usefixtures("environment")

ASKED = {"model": "Qwen3-0.6B", "machine": "2xH100", "workload": "chat", "ttft": "500"}
ASKED |= {"tpot": "50", "share": "90", "rate": "30"}


def report_of(job: ServeJob, machine: object, slo: Slo) -> GoodputReport:
    curve = ((2.0, 1.0), (5.0, 0.9), (8.0, 0.4))
    both = DisaggSetting(scheduler=Choice(name="fcfs"), both=Phase(count=2))
    apart = DisaggSetting(prefill=Phase(), decode=Phase())
    return GoodputReport(
        job=job,
        machine=machine,
        devices=2,
        slo=slo,
        tried=(
            SettingResult(setting=both, goodput=10.0, per_device=5.0, curve=curve),
            SettingResult(setting=apart, goodput=8.0, per_device=4.0, curve=curve),
        ),
        why="one engine for both phases serve 10 requests/s <b>",
    )


class Planner:
    """Finds the same at once, or simulates until it is told to end."""

    def __init__(self, *, endless: bool = False) -> None:
        self.endless, self.asked, self.begun = endless, 0, threading.Event()

    def __call__(self, job, machine, slo, *, costs, tolerance, progress) -> GoodputReport:
        self.asked += 1
        progress(1, 4, "fcfs")
        self.begun.set()
        while True:
            assert costs(1, 1).seconds([(0, 100)]) > 0
            if not self.endless:
                return report_of(job, machine, slo)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def over(searches: GoodputSearches, query: dict[str, str]) -> dict[str, object]:
    """What the page shows when the search is over."""
    search = show(query, searches, None, begin=True)["search"]
    assert isinstance(search, GoodputSearch) and search.finished.wait(30)
    return show(query, searches, None, begin=False)


class Watched:
    """A watch that has seen two pages, 10 s apart."""

    health = ServerHealth(True, True, "ready")

    def __init__(self, ttft: str = "", tpot: str = "", success: float = 20.0) -> None:
        self.pages = (
            Scrape.of("shoal:request_success_total 5\n"),
            Scrape.of(
                f"shoal:request_success_total {5 + success}\n"
                + _histogram("time_to_first_token_seconds", ttft)
                + _histogram("request_time_per_output_token_seconds", tpot)
            ),
        )

    def look(self) -> None:
        """Asked before."""

    def between(self) -> tuple[Scrape, Scrape, float]:
        return (*self.pages, 10.0)


def _histogram(name: str, counts: str) -> str:
    bounds = ("0.05", "0.5", "+Inf")
    pairs = zip(bounds, counts.split(), strict=False)
    return "".join(f'shoal:{name}_bucket{{le="{bound}"}} {count}\n' for bound, count in pairs)


def test_what_was_found_is_drawn_and_kept() -> None:
    planner = Planner()
    searches = GoodputSearches(plan=planner)
    page = over(searches, ASKED)
    assert page["error"] == "" and page["state"] == "finished" and page["copies"] == 3
    drawn = page["chart"].render()  # type: ignore[attr-defined]
    for name in ("fcfs 2x", "prefill 1x, decode 1x", "wanted"):
        assert name in drawn
    assert "requested rate" not in drawn  # 15 a device is far beyond what is served
    near = over(searches, {**ASKED, "rate": "12"})
    assert "requested rate" in near["chart"].render()  # type: ignore[attr-defined]
    assert planner.asked == 1  # the rate is no part of what is searched


def test_the_server_stands_between_what_both_histograms_allow() -> None:
    slo = Slo(ttft=0.5, tpot=0.05)
    seen = measured(Watched("4 16 20", "14 20 20"), slo)  # type: ignore[arg-type]
    assert seen is not None and seen.rate == 2.0
    assert (seen.ttft, seen.tpot) == (pytest.approx(0.8), pytest.approx(0.7))
    assert (seen.low, seen.high) == (pytest.approx(0.5), pytest.approx(0.7))
    alone = measured(Watched("20 20 20"), slo)  # type: ignore[arg-type]
    assert alone is not None and (alone.low, alone.high) == (1.0, 1.0)
    assert measured(None, slo) is None
    assert measured(Watched(success=0.0), slo) is None  # type: ignore[arg-type]
    assert measured(Watched(), slo) is None  # type: ignore[arg-type]
    searches = GoodputSearches(plan=Planner())
    over(searches, ASKED)
    watched = Watched("4 16 20", "14 20 20")
    page = show(ASKED, searches, watched, begin=False)  # type: ignore[arg-type]
    assert "your server" in page["chart"].render() and page["state"] == "running"


def test_a_new_question_ends_the_search_before() -> None:
    planner = Planner(endless=True)
    searches = GoodputSearches(plan=planner)
    first = show(ASKED, searches, None, begin=True)
    assert first["state"] == "running" and planner.begun.wait(30)
    again = show(ASKED, searches, None, begin=True)["search"]
    assert again is first["search"] and again.total == 4
    planner.endless = False
    assert over(searches, {**ASKED, "ttft": "900"})["report"] is not None
    assert first["search"].finished.is_set()
    planner.endless = False
    ended = show(ASKED, searches, None, begin=False)
    assert ended["report"] is not None or "another search" in ended["error"]


def test_a_search_ends_with_its_time() -> None:
    clock, planner = Clock(), Planner(endless=True)
    searches = GoodputSearches(clock=clock, limit_s=60.0, plan=planner)
    search = show(ASKED, searches, None, begin=True)["search"]
    assert planner.begun.wait(30)
    clock.now = 61.0
    assert search.finished.wait(30)
    assert "no result within 60 s" in show(ASKED, searches, None, begin=False)["error"]
    planner.endless = False
    assert over(searches, ASKED)["report"] is not None  # it may be asked again


def test_a_search_that_breaks_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    event = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: event.set())

    def broken(*_: object, **__: object) -> GoodputReport:
        raise RuntimeError("broken")

    assert "the search failed" in over(GoodputSearches(plan=broken), ASKED)["error"]
    assert event.wait(30)  # and the terminal says why


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"ttft": "0.02"}, "TTFT target 0.02 ms is below the prefill time"),
        ({"tpot": "0.01"}, "TPOT target 0.01 ms is below the time of a step"),
        ({"model": ""}, "fits no phase"),
    ],
)
def test_what_nothing_can_serve_is_said(change: dict[str, str], told: str) -> None:
    from shoal.cost import shapes

    if "model" in change:  # the largest there is
        largest = max(shapes.names(), key=lambda name: shapes.find(name).hidden)
        change = {"model": largest}
    assert told in over(GoodputSearches(), {**ASKED, **change})["error"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "Qwen4-1T"}, "expected one of the"),
        ({"model": "/etc/passwd"}, "expected one of the"),
        ({"machine": "/etc/passwd"}, "expected a name or a shorthand"),
        ({"machine": "<script>"}, "expected a name or a shorthand"),
        ({"machine": "H100"}, "2 to 16 devices here"),
        ({"machine": "4096xH100"}, "2 to 16 devices here"),
        ({"workload": "azure"}, "chat, code"),
        ({"ttft": "-1"}, "a number from 0.01"),
        ({"ttft": "nan"}, "a number from 0.01"),
        ({"tpot": "1e999"}, "a number from 0.01"),
        ({"tpot": "soon"}, "a number from 0.01"),
        ({"share": "0"}, "a number from 1 to 100"),
        ({"share": "101"}, "a number from 1 to 100"),
        ({"rate": "0"}, "a number from 0.001"),
    ],
)
def test_mistakes_are_said_on_the_page(
    client: TestClient, change: dict[str, str], told: str
) -> None:
    page = client.get("/goodput", params={**ASKED, **change})
    assert page.status_code == 200 and told in html.unescape(page.text)
    assert "<script>" not in page.text.replace("<script src=", "")


def test_pages(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = GoodputSearches(plan=Planner())
    monkeypatch.setattr("shoal.app.dash.app.GoodputSearches", lambda: searches)
    client = client_of(settings(home))
    assert "has expired" in client.get("/goodput/live", params=ASKED).text
    over(searches, ASKED)
    page = client.get("/goodput", params=ASKED).text
    part = client.get("/goodput/live", params=ASKED)
    assert part.headers["x-run-state"] == "finished" and "<h1" not in part.text
    for text in (page, part.text):
        assert "serve 10 requests/s &lt;b&gt;" in text and "takes 3 times" in text
        assert "from the declared rates of 2xH100" in text
        assert "together" in text and "apart" in text
    (chart,) = client.get("/goodput/curves", params=ASKED).json()["plots"]
    assert chart["series"][-1]["name"] in ("wanted", "requested rate")
    assert "live.js" not in page and "plots.js" in page
    assert 'value="Qwen3-0.6B"' in page and "<option selected>chat" in page


def test_families_need_no_file() -> None:
    assert set(FAMILIES) <= set(WORKLOADS)
    for name in FAMILIES:
        WORKLOADS.build(name, where="workload")
    assert goodput.LIMIT_S <= 120
