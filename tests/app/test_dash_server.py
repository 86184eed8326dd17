"""The server's page: what its metrics say of the last minutes, and answers token by token."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from dash_home import BASE, KEY, client_of, running, settings
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from chromium import chromium
from shoal.app.dash.guard import CHAT
from shoal.app.status import status
from shoal.core.errors import ServeError
from shoal.serve.watch.moments import WINDOW_S, Watch
from shoal.serve.watch.scrape import Scrape, quantile, share_below
from shoal.serve.watch.upstream import Token, Upstream

pytestmark = pytest.mark.usefixtures("environment")

BOUNDS = (0.01, 0.1, 1.0)


class Numbers:
    """A server's histograms and counters, as its own library writes them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ttft, self.gap = (
            Histogram(
                f"shoal:{name}", "x", ("model_name",), buckets=BOUNDS, registry=self.registry
            ).labels('odd "}name')
            for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")
        )
        self.lines = {"num_requests_running": 2.0, "num_requests_waiting": 1.0}
        self.lines |= {"kv_cache_usage_perc": 0.25, "num_preemptions_total": 3.0}
        self.lines |= {"engine_generated_tokens_total": 100.0}

    def text(self) -> str:
        notes = [f'shoal:{name}{{model_name="t}}"}} {value}' for name, value in self.lines.items()]
        return generate_latest(self.registry).decode() + "\n".join(notes) + "\n"


class Serve(BaseHTTPRequestHandler):
    """As much of ``shoal serve`` as the page asks, with a key."""

    numbers = Numbers()
    page: str | None = None

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/health":
            self._say(200, "{}")
        elif self.headers.get("authorization") != f"Bearer {KEY}":
            self._say(401, '{"error": {"message": "no key"}}')
        elif self.path == "/metrics":
            self._say(200, self.numbers.text() if self.page is None else self.page)
        else:
            self._say(200, '{"data": [{"id": "tiny", "max_model_len": 400}]}')

    def do_POST(self) -> None:
        data = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert data["logprobs"] is True
        top = [{"token": " yes", "logprob": math.log(0.75)}, {"token": "<b>", "logprob": -9999.0}]
        one = {"token": " yes", "logprob": math.log(0.75), "top_logprobs": top}
        events = [{"delta": {"content": " yes"}, "logprobs": {"content": [one]}}]
        events += [{"delta": {"content": data["model"]}, "logprobs": None}]
        if data["messages"][-1]["content"] == "odd":
            events += [{"delta": {"content": "x"}, "logprobs": {"content": [{"token": "x"}]}}]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in events:
            self.wfile.write(f"data: {json.dumps({'choices': [event]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.setattr(Serve, "numbers", Numbers())
    monkeypatch.setattr(Serve, "page", None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Serve)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def upstream(serve: ThreadingHTTPServer) -> Upstream:
    return Upstream(f"http://127.0.0.1:{serve.server_port}", KEY)


def _again(serve: ThreadingHTTPServer, port: int) -> None:
    """Start a server that was closed, where it was."""
    serve.__init__(("127.0.0.1", port), Serve)  # type: ignore[misc]
    threading.Thread(target=serve.serve_forever, args=(0.01,), daemon=True).start()


class Clock:
    """A clock that goes when it is told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


# Pages of metrics


@given(st.lists(st.floats(1e-4, 2.0), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    buckets = {bound: float(sum(v <= bound for v in values)) for bound in (*BOUNDS, math.inf)}
    true = sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]
    result = quantile(buckets, share)
    low = max((bound for bound in BOUNDS if bound < true), default=0.0)
    high = min((bound for bound in BOUNDS if bound >= true), default=BOUNDS[-1])
    assert low - 1e-12 <= result <= high + 1e-12
    for bound in BOUNDS:
        assert share_below(buckets, bound) == pytest.approx(buckets[bound] / len(values))
    assert share_below(buckets, 50.0) == buckets[BOUNDS[-1]] / len(values)


def test_an_empty_histogram_has_no_quantile() -> None:
    assert math.isnan(quantile({}, 0.5)) and math.isnan(share_below({}, 0.5))
    assert math.isnan(quantile({0.1: 0.0, math.inf: 0.0}, 0.5))


def test_a_page_adds_labels_and_passes_over_the_rest() -> None:
    page = Scrape.of(
        'shoal:a_total{replica="0",m="x}y"} 1\nshoal:a_total{replica="1",m="\\"}"} 2.5 123\n'
        'vllm:a_total 7\n# shoal:c 1\nshoal:k{replica="0"} 0.2\n'
        'shoal:k{replica="1"} 0.4\nshoal:h_bucket{le="0.1"} 3\nshoal:h_bucket{le="+Inf"} 4\n'
    )
    assert page.value("a_total") == 3.5 and page.mean("k") == pytest.approx(0.3)
    assert page.replicas == {"0", "1"} and page.buckets["h"] == {0.1: 3.0, math.inf: 4.0}
    assert math.isnan(page.value("c"))
    for text in ("<html>\n", "shoal:b{} nonsense\n", 'shoal:b{le="x"} 1\n', 'shoal:b{a="} 1\n'):
        with pytest.raises(ServeError, match="expected a page of metrics"):
            Scrape.of(text)


# The last minutes


def test_the_window_shows_what_came_within_it(upstream: Upstream) -> None:
    clock = Clock()
    watch = Watch(upstream, clock)
    for _ in range(50):
        Serve.numbers.ttft.observe(0.9)  # long before
    health, moments = watch.look()
    assert health.ready and moments[-1].get("running") == 2
    assert math.isnan(moments[-1].get("ttft_p50"))  # nothing to compare with yet
    clock.now += 10
    for value in (0.05, 0.05, 0.5):
        Serve.numbers.ttft.observe(value)
    Serve.numbers.lines["num_preemptions_total"] += 2
    Serve.numbers.lines["engine_generated_tokens_total"] += 70
    _, moments = watch.look()
    seen = moments[-1]
    assert 0.01 < seen.get("ttft_p50") <= 0.1 < seen.get("ttft_p99") <= 1.0
    assert seen.get("preemptions") == 2 and seen.rate("tokens") == pytest.approx(7)
    assert seen.get("cache") == 0.25 and math.isnan(seen.get("gap_p50"))
    clock.now += WINDOW_S + 1  # all of it is past
    _, moments = watch.look()
    assert math.isnan(moments[-1].get("ttft_p50"))
    assert len(moments) == 3 and watch.look()[1] == moments  # not asked twice in a second


def test_a_server_that_begins_anew_is_not_compared_with_before(upstream: Upstream) -> None:
    clock = Clock()
    watch = Watch(upstream, clock)
    Serve.numbers.ttft.observe(0.9)
    watch.look()
    Serve.numbers = Numbers()
    Serve.numbers.lines["engine_generated_tokens_total"] = 5.0
    clock.now += 5
    _, moments = watch.look()
    assert moments[-1].get("running") == 2 and math.isnan(moments[-1].rate("tokens"))
    assert watch.between() is None
    clock.now += 5
    Serve.numbers.lines["engine_generated_tokens_total"] = 15.0
    assert watch.look()[1][-1].rate("tokens") == pytest.approx(2)
    assert watch.between() is not None


def test_a_server_that_goes_is_told_and_taken_up_again(
    home: Path, serve: ThreadingHTTPServer, upstream: Upstream
) -> None:
    clock = Clock()
    watch = Watch(upstream, clock)
    watch.look()
    good, port = Serve.numbers, serve.server_port
    serve.shutdown()
    serve.server_close()
    clock.now += 2
    health, moments = watch.look()
    assert not health.answers and "does not answer" in health.message and not moments[-1].values
    _again(serve, port)
    clock.now += 2
    assert Serve.numbers is good and watch.look()[0].ready


@pytest.mark.parametrize(
    ("page", "key", "told"),
    [
        (None, "", "requires its API key"),
        (None, "another", "rejects the key"),
        ("vllm:num_requests_running 1\n", KEY, "no metrics of Shoal"),
        ("<html>", KEY, "no metrics of Shoal"),
    ],
)
def test_what_is_wrong_with_a_server_is_said(
    home: Path, upstream: Upstream, page: str | None, key: str, told: str
) -> None:
    Serve.page = page
    client = client_of(settings(home, server=Upstream(upstream.url, key)))
    for path in ("/server", "/server/live"):
        answer = client.get(path)
        assert answer.status_code == 200 and told in answer.text, answer.text
        assert "<html>" not in answer.text.replace('<html lang="en">', "")
        assert "another" not in answer.text and KEY not in answer.text


def test_the_status_of_a_server(
    serve: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    status("127.0.0.1", serve.server_port, KEY)
    shown = capsys.readouterr().out
    assert "running requests" in shown and "0.25" in shown
    Serve.page = "<html>\n"
    with pytest.raises(ServeError, match="has no metrics"):
        status("127.0.0.1", serve.server_port, KEY)
    with pytest.raises(ServeError, match=r"answered 401.*--api-key-file"):
        status("127.0.0.1", serve.server_port, None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ServeError, match="no server at"):
            status("127.0.0.1", free.getsockname()[1], None)


# The pages


def test_the_changing_part_is_drawn(home: Path, upstream: Upstream) -> None:
    client = client_of(settings(home, server=upstream))
    page = client.get("/server").text
    part = client.get("/server/live")
    assert part.headers["x-run-state"] == "running" and "<h1" not in part.text
    for text in (page, part.text):
        assert "✓</span> ready" in text and "running requests" in text
        assert KEY not in text
    assert 'data-plots="/server/curves"' in page
    drawn = {one["title"]: one for one in client.get("/server/curves").json()["plots"]}
    assert "at last running 2 requests, waiting 1 requests" in drawn["Requests"]["description"]
    assert drawn["Requests"]["cover"] == [[-60.0, 0.0], [0.0, 1.0]]
    assert [line["values"][-1] for line in drawn["Requests"]["series"]] == [2.0, 1.0]
    first = drawn["TTFT (time to first token)"]["series"]
    assert all(set(line["values"]) == {None} and line["broken"] for line in first)
    for path in ("/server/live", "/server/curves"):
        assert client_of(settings(home)).get(path).status_code == 404


def test_tokens_come_with_their_probabilities(home: Path, upstream: Upstream) -> None:
    said = [{"role": "user", "content": "x"}]
    first, rest = upstream.stream("", said)
    assert first.text == " yes" and rest.text == "tiny"  # the name of its only model
    assert first.tokens == (
        Token(" yes", pytest.approx(0.75), ((" yes", pytest.approx(0.75)), ("<b>", 0.0))),
    )
    assert rest.tokens == ()
    client = client_of(settings(home, server=upstream))
    headers = {"origin": BASE}
    requests = {"model": "tiny", "messages": said}
    lines = client.post(CHAT, json=requests, headers=headers).text.splitlines()
    assert json.loads(lines[0])["tokens"][0]["top"][1] == ["<b>", 0.0]
    page = client.post(CHAT, data={"model": "tiny", "message": "x"}, headers=headers).text
    assert "75.0 %" in page and "Its tokens" in page and "<b>&" not in page
    requests["messages"] = [{"role": "user", "content": "odd"}]
    last = client.post(CHAT, json=requests, headers=headers).text.splitlines()[-1]
    assert "sent an invalid response" in json.loads(last)["error"]


@pytest.mark.slow
def test_in_a_real_browser(
    home: Path, serve: ThreadingHTTPServer, upstream: Upstream, tmp_path: Path
) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    origin = f"http://127.0.0.1:{listening.getsockname()[1]}"
    chosen = settings(home, server=upstream)
    errors: list[str] = []
    with running(chosen, listening), chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console",
            lambda m: errors.append(m.text) if m.type in ("error", "warning") else None,
        )
        page.goto(f"{origin}/?token={chosen.access.token}")
        page.wait_for_url(f"{origin}/")

        page.goto(f"{origin}/server")
        page.evaluate("window.same = true")
        for value in (0.02, 0.03, 0.4):
            Serve.numbers.ttft.observe(value)
            Serve.numbers.gap.observe(value / 10)
        page.locator(".plot canvas").first.wait_for()

        page.get_by_label("Your message").fill("hello")
        page.get_by_role("button", name="Send").click()
        page.get_by_text("The answer is complete.").wait_for()
        mark = page.locator(".token")
        assert mark.count() == 1 and mark.get_attribute("data-sure") == "1"
        mark.hover()
        shown = page.locator("[data-inspect]")
        assert "75.0 %" in shown.inner_text() and '"<b>"' in shown.inner_text()
        page.locator(".said p").last.focus()
        page.keyboard.press("ArrowRight")
        assert mark.get_attribute("data-chosen") == ""
        page.screenshot(path=tmp_path / "server.png", full_page=True)

        port = serve.server_port
        serve.shutdown()
        serve.server_close()
        page.get_by_text("does not answer").wait_for()
        page.get_by_text("the charts show earlier values").wait_for()
        _again(serve, port)
        page.get_by_text("✓ ready").wait_for()
        assert page.evaluate("window.same") is True
        assert page.get_by_text("hello").is_visible()  # the talk stays

        page.goto(f"{origin}/goodput")
        page.get_by_label("Most ms to the first token").fill("0.02")
        page.get_by_role("button", name="Search").click()
        page.get_by_role("alert").get_by_text("below the prefill time").wait_for()
        page.set_viewport_size({"width": 360, "height": 740})
        for path in ("/server", "/goodput"):
            page.goto(origin + path)
            wide = "document.documentElement.scrollWidth - window.innerWidth"
            assert page.evaluate(wide) <= 0, path
    assert errors == []
