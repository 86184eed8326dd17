"""The dashboard in a real browser: it fits, it can be read and reached, and its charts work."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from dash_home import (
    KEY,
    PAGES,
    beat,
    fly,
    make_run,
    running,
    settings,
    start,
    step,
    write_events,
)
from dash_serve import serving

from chromium import chromium
from shoal.cost.score import Score, run_id
from shoal.serve.watch.upstream import Upstream
from shoal.train.layout import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AXE = (Path(__file__).parents[1] / "vendor" / "axe.min.js").read_text()
STEPS = 3000


def _is_wrong(message: Any) -> bool:
    # That these tests read pixels of a chart is no fault of the page.
    return message.type in ("error", "warning") and "getImageData" not in message.text


@dataclass
class Look:
    """A dashboard, a browser that looks at it, and what went wrong meanwhile."""

    browser: Any
    origin: str
    token: str
    home: Path
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def open(self, **options: Any) -> Any:
        """A page that has come with the token."""
        page = self.browser.new_context(**options).new_page()
        page.set_default_timeout(15_000)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on(
            "console",
            lambda m: self.errors.append(m.text) if _is_wrong(m) else None,
        )
        page.goto(f"{self.origin}/?token={self.token}")
        page.wait_for_url(f"{self.origin}/")
        return page

    def run(self, name: str, rest: str = "") -> str:
        """Address of the page of a run."""
        return f"{self.origin}/runs/{run_id(self.home / 'runs' / name)}{rest}"


@pytest.fixture(scope="module")
def look(home: Path) -> Iterator[Look]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(home))
        score = Score(home / "score.db")
        make_run(score, home / "runs" / "long", end=None, report=False)
        noisy = [step(n, 7 / (1 + n / 50) + 0.2 * math.sin(n)) for n in range(STEPS)]
        write_events(home / "runs" / "long", start(STEPS), *noisy)
        make_run(score, home / "runs" / "resumed", end=None, report=False)
        write_events(
            home / "runs" / "resumed",
            *({**one, "time": 100.0 + n} for n, one in enumerate([start(), step(0), step(1)])),
            *({**one, "time": 200.0 + n} for n, one in enumerate([start(), step(1), step(2)])),
        )
        for rank in range(4):
            fly(home / "runs" / "resumed" / "ranks", rank, slow=1)
        beat(home / "runs" / "resumed", 3600)
        (home / "runs" / "resumed" / "ranks" / "rank-0.error").write_text('{"message": "gone"}')
        listening = socket.create_server(("127.0.0.1", 0))
        with serving() as port:
            upstream = Upstream(f"http://127.0.0.1:{port}", KEY)
            chosen = settings(home, server=upstream, plans=(RunDir(home / "runs" / "done").plan,))
            with running(chosen, listening), chromium() as browser:
                origin = f"http://127.0.0.1:{listening.getsockname()[1]}"
                yield Look(browser, origin, chosen.access.token, home)


@pytest.fixture(autouse=True)
def nothing_goes_wrong(look: Look) -> Iterator[None]:
    """No error of a script, of the pages' policy or of a file, and no request to elsewhere."""
    beat(look.home / "runs" / "alive", 0.5)
    yield
    errors, asked = list(look.errors), list(look.asked)
    look.errors.clear()
    look.asked.clear()
    assert errors == []
    assert asked and all(url.startswith((f"{look.origin}/", "file:", "data:")) for url in asked)


def _addresses(look: Look) -> list[str]:
    done, alive, resumed = (run_id(look.home / "runs" / n) for n in ("done", "alive", "resumed"))
    return [
        *(look.origin + path for path in PAGES),
        look.run("done"),
        look.run("alive"),
        look.run("resumed", "/timeline"),
        f"{look.origin}/plans/{done}",
        f"{look.origin}/compare?a={done}&b={alive}",
        f"{look.origin}/compare",
        f"{look.origin}/runs/{resumed}",
        f"{look.origin}/server/workers",
        f"{look.origin}/explore?model=shoal-4m&machine=2xlaptop&seq_len=256&global_batch=8&tokens=1M",
        f"{look.origin}/explore?model=Qwen3-14B&machine=16xH100&tokens=20B&what_if=1",
        f"{look.origin}/explore?model=nothing",
        f"{look.origin}/goodput?model=nothing",
        f"{look.origin}/plans/file/0",
        look.run("killed"),
        f"{look.origin}/score?quantity=step_s",
        f"{look.origin}/claims/status/works",
        f"{look.origin}/claims/48",
        f"{look.origin}/nowhere",
    ]


def _settled(page: Any, address: str) -> None:
    """Go there, and wait for the charts."""
    page.goto(address)
    _drawn(page)


def _drawn(page: Any) -> None:
    """Wait until the charts have the values that were asked for last."""
    for number in range(page.locator("[data-plots]").count()):
        drawn = page.locator("[data-plots]:not([aria-busy]) > .plot-grid")
        drawn.nth(number).wait_for(state="attached")


def _violations(page: Any, name: str) -> dict[tuple[str, str], list[str]]:
    """What axe finds: page and rule -> some elements."""
    page.evaluate(AXE)
    return {
        (name, rule["id"]): [node["html"][:200] for node in rule["nodes"][:3]]
        for rule in page.evaluate("axe.run().then((all) => all.violations)")
    }


def test_nothing_sticks_out_and_axe_finds_nothing(look: Look) -> None:
    found = {}
    for width, theme in ((390, "dark"), (800, "light"), (1400, "light")):
        page = look.open(color_scheme=theme, viewport={"width": width, "height": 844})
        for address in _addresses(look):
            _settled(page, address)
            wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            assert wide <= 0, (address, width)
            if width == 800:
                continue
            found |= _violations(page, f"{address.removeprefix(look.origin)} {width}")
        page.context.close()
    look.errors[:] = [one for one in look.errors if "404" not in one]  # the page that is none
    assert found == {}


def test_every_control_is_reached_by_keyboard_and_shows_it(look: Look) -> None:
    page = look.open()
    for address in (look.run("done"), look.run("resumed", "/timeline"), f"{look.origin}/server"):
        _settled(page, address)
        wanted = page.evaluate(
            "[...document.querySelectorAll('a[href], button, input, select, textarea, summary,"
            " [tabindex=\"0\"]')].filter((one) => one.checkVisibility() && one.type !== 'hidden'"
            " && !one.disabled).length"
        )
        seen = set()
        for _ in range(wanted + 2):
            page.keyboard.press("Tab")
            here = page.evaluate(
                "[document.activeElement === document.body ? '' :"
                " (document.activeElement.mark ??= String(Math.random())),"
                " getComputedStyle(document.activeElement).outlineStyle,"
                " document.activeElement.outerHTML.slice(0, 99)]"
            )
            if here[0]:
                seen.add(here[0])
                assert here[1] != "none", here[2]
        assert len(seen) >= wanted, address


# The charts


def _chart(page: Any, title: str) -> Any:
    return page.locator("figure.plot", has=page.locator(f"figcaption b:text-is('{title}')"))


def _value(chart: Any, number: int = 0) -> str:
    return str(chart.locator(".plot-value").nth(number).inner_text())


def _place(page: Any, chart: Any, key: str) -> float:
    """The step that a key leads to."""
    chart.locator(".plot-host").press(key)
    at = re.search(r"at ([\d.,]+) step", chart.locator(".plot-place").inner_text())
    assert at is not None
    return float(at[1].replace(",", ""))


_PIXELS = """([canvas, wanted]) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const near = (at) => wanted.every((value, part) => Math.abs(data[at + part] - value) < 24);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) count += data[at + 3] > 200 && near(at) ? 1 : 0;
  return count;
}"""


def _pixels(page: Any, chart: Any, colour: tuple[int, int, int]) -> int:
    """Pixels of the chart in about this colour."""
    return int(page.evaluate(_PIXELS, [chart.locator("canvas").element_handle(), list(colour)]))


def test_charts_show_values_and_zoom(look: Look) -> None:
    page = look.open(viewport={"width": 1400, "height": 1000}, color_scheme="light")
    _settled(page, look.run("long"))
    loss, rate = _chart(page, "Loss"), _chart(page, "Learning rate")
    assert page.locator("figure.plot").count() == 6
    blue, bright = (0, 0x72, 0xB2), (0x55, 0xB1, 0xEE)
    assert _pixels(page, loss, blue) > 300 > _pixels(page, loss, bright)
    page.emulate_media(color_scheme="dark")
    canvas = loss.locator("canvas").element_handle()
    page.wait_for_function(f"(given) => ({_PIXELS})(given) > 300", arg=[canvas, list(bright)])
    assert _pixels(page, loss, blue) < 300

    # The pointer: all charts of the run show the same step.
    box = loss.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    assert "step" in loss.locator(".plot-place").inner_text()
    assert loss.locator(".plot-place").inner_text() == rate.locator(".plot-place").inner_text()
    assert 0 < float(_value(loss)) < 1

    # Three steps are a point, until one zooms in.
    assert _place(page, loss, "Home") == 1.0 and _place(page, loss, "ArrowRight") == 4.0
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60, steps=4)
    with page.expect_response(re.compile(r"/curves\?from=1[45].*&to=1[78]")):
        page.mouse.up()
    _drawn(page)
    first = _place(page, loss, "Home")
    assert 1400 < first < 1600 and _place(page, loss, "ArrowRight") == first + 1
    assert 1400 < _place(page, rate, "Home") < 1600
    with page.expect_response(re.compile(r"/curves$")):
        page.get_by_role("button", name="Reset zoom").click()
    _drawn(page)
    assert _place(page, loss, "Home") == 1.0

    # By keyboard.
    loss.locator(".plot-host").press("End")
    with page.expect_response(re.compile(r"/curves\?from=")):
        loss.locator(".plot-host").press("+")
    _drawn(page)
    assert _place(page, loss, "Home") > 1000
    with page.expect_response(re.compile(r"/curves$")):
        loss.locator(".plot-host").press("0")
    _drawn(page)
    _place(page, loss, "End")
    assert "step 2,99" in loss.get_by_role("status").inner_text()
    page.context.close()


def test_charts_are_smoothed_and_lines_hidden(look: Look) -> None:
    page = look.open(viewport={"width": 1400, "height": 1000}, color_scheme="light")
    _settled(page, look.run("long"))
    loss = _chart(page, "Loss")
    raw = _value(loss)
    slider = page.get_by_label("Smoothing")
    slider.fill("0.95")
    measured, mean = re.fullmatch(r"([\d.]+) \(([\d.]+)\)", _value(loss)).groups()  # type: ignore[union-attr]
    assert measured == raw and mean != raw
    slider.fill("0")
    assert _value(loss) == raw
    button = loss.get_by_role("button", name="training")
    blue = (0, 0x72, 0xB2)
    before = _pixels(page, loss, blue)
    button.click()
    assert button.get_attribute("aria-pressed") == "false" and _pixels(page, loss, blue) < 9
    button.press("Enter")
    assert _pixels(page, loss, blue) == before

    # Two runs over each other.
    a, b = (run_id(look.home / "runs" / name) for name in ("long", "done"))
    _settled(page, f"{look.origin}/compare")
    page.get_by_label("Run A").select_option(a)
    page.get_by_label("Run B").select_option(b)
    page.get_by_role("button", name="Compare").click()
    loss = _chart(page, "Loss")
    loss.wait_for()
    names = loss.locator(".plot-legend button").all_inner_texts()
    assert names == ["A: long", "B: done", "B: done, held-out"]
    assert page.get_by_role("columnheader", name="B: done").count() >= 1
    page.context.close()


def test_a_live_run_grows_without_a_reload(look: Look) -> None:
    root = look.home / "runs" / "alive"
    page = look.open()
    _settled(page, look.run("alive"))
    page.evaluate("window.same = true")
    loss = _chart(page, "Loss")
    assert page.get_by_text("step 7 of 30").is_visible() and _value(loss) == "1"
    stop = {"time": 9.0, "kind": "stop", "step": 11}
    write_events(root, *map(step, range(7, 11)), stop, more=True)
    page.get_by_text("This run is over: stopped.").wait_for()
    assert page.get_by_text("step 11 of 30").is_visible()
    loss.locator(".plot-value", has_text="0.63636").wait_for()
    assert page.evaluate("window.same") is True
    page.context.close()
    write_events(root, start(), *map(step, range(7)))


def test_the_theme_is_switched_and_kept(look: Look) -> None:
    page = look.open(color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    button = page.get_by_role("button", name="Theme")
    button.click()  # light
    button.click()
    dark = page.evaluate(paper)
    page.goto(f"{look.origin}/runs")
    assert light != dark == page.evaluate(paper)
    page.context.close()


def test_the_chat_by_keyboard(look: Look) -> None:
    page = look.open()
    page.goto(f"{look.origin}/server")
    page.get_by_label("Your message").focus()
    page.keyboard.type("by keyboard")
    page.keyboard.press("Control+Enter")
    page.get_by_text("You said: by keyboard <b>&").wait_for()
    page.get_by_text("The answer is complete.").wait_for()
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("refuse")
    page.keyboard.press("Control+Enter")
    page.get_by_role("alert").get_by_text("too many requests").wait_for()
    page.goto(f"{look.origin}/runs")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.context.close()


def test_without_scripts_pages_say_the_same_in_tables(look: Look) -> None:
    page = look.open(java_script_enabled=False)
    page.goto(look.run("alive"))
    page.get_by_text("Charts are drawn with JavaScript").wait_for()
    page.get_by_text("The curves as a table").click()
    assert page.get_by_role("region", name="The curves as a table").is_visible()
    page.get_by_role("link", name="Reload").click()
    page.goto(f"{look.origin}/server")
    page.get_by_label("Your message").fill("no script")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("You said: no script").wait_for()
    page.context.close()


def test_a_report_opened_from_the_disk(look: Look) -> None:
    page = look.open(viewport={"width": 390, "height": 844})
    page.goto((look.home / "runs" / "done" / "report.html").as_uri())
    assert page.locator("svg").count() == 3
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert _violations(page, theme) == {}
    page.context.close()
