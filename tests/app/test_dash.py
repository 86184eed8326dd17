"""The dashboard: what its pages show."""

import contextlib
import http.client
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from dash_home import (
    BASE,
    KEY,
    PAGES,
    beat,
    client_of,
    make_run,
    plan_of,
    running,
    settings,
    start,
    step,
    write_events,
)
from dash_serve import Serve, serving
from starlette.testclient import TestClient

from shoal.app.commands.dash import dash
from shoal.app.dash.app import DashboardSettings
from shoal.app.dash.guard import CHAT, HEALTH
from shoal.core.errors import ConfigError, ServeError
from shoal.cost.score import Score, run_id
from shoal.serve.watch.upstream import Upstream
from shoal.train.layout import RunDir
from shoal.train.runs import Events

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(scope="module")
def upstream():
    with serving() as port:
        yield Upstream(f"http://127.0.0.1:{port}", KEY)


# Pages


@pytest.mark.parametrize("path", [*PAGES, "/compare"])
def test_every_page_is_whole_and_accessible(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    page = answer.text
    assert page.count("<h1>") == 1 and '<html lang="en">' in page
    assert '<a class="skip" href="#main">' in page and '<main id="main"' in page
    assert page.count('aria-current="page"') == 1
    assert page.count("<table") == page.count("<caption")
    assert all("scope=" in head for head in re.findall(r"<th\b[^>]*>", page))
    assert page.count('<svg xmlns="http://www.w3.org/2000/svg"') == page.count("<desc>")
    for field in re.findall(r'<(?:input|select|textarea) [^>]*id="([^"]+)"', page):
        assert f'<label for="{field}">' in page
    assert "style=" not in page and "onclick" not in page
    outside = re.findall(r'(?:src|href|action)="(https?:|//)', page)
    assert not outside


def test_overview_and_runs_tell_states_and_numbers(client: TestClient, home: Path) -> None:
    page = client.get("/runs").text
    order = re.findall(r'<th scope="row"><a href="/runs/([^"]+)">([^<]+)</a>', page)
    assert next(name for _, name in order) == "alive"  # live first, though others are newer
    assert {name for _, name in order} == {"alive", "before", "killed", "asked-to-stop", "done"}
    for state in ("running now", "failed", "stopped", "finished"):
        assert state in page
    assert "+5.0 %" in page  # 21 ms measured, 20 ms predicted
    filtered = client.get("/runs", params={"q": "SHOAL-8M"}).text
    assert ">alive<" in filtered and ">done<" not in filtered
    none = client.get("/runs", params={"q": "<script>"}).text
    assert "&lt;script&gt;" in none and "<script>" not in none.replace("<script src=", "")
    overview = client.get("/").text
    assert "1 running now" in overview and "step time" in overview and "papers" in overview


def test_a_run_shows_curves_and_prediction_beside_measurement(
    client: TestClient, home: Path
) -> None:
    address = f"/runs/{run_id(home / 'runs' / 'done')}"
    page = client.get(address).text
    assert f'data-plots="{address}/curves"' in page and "The curves as a table" in page
    drawn = {one["title"]: one for one in client.get(f"{address}/curves").json()["plots"]}
    assert list(drawn) == [
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
        "Model FLOPs utilisation",
        "Memory of rank 0",
    ]
    training, held_out = drawn["Loss"]["series"]
    assert drawn["Loss"]["at"] == [float(x) for x in range(31)] and held_out["points"]
    assert training["values"] == [*(7.0 / (1 + x) for x in range(30)), None]
    assert held_out["values"] == [None] * 30 + [1.5]
    rate = drawn["Tokens per second"]
    assert rate["series"][1]["dashed"] and rate["bands"][0]["colour"] == 1
    assert rate["bands"][0]["low"][0] < 4096 / 0.02 < rate["bands"][0]["high"][0]
    part = client.get(f"{address}/curves", params={"from": 9.5, "to": 12}).json()["plots"]
    assert part[0]["at"] == [10.0, 11.0, 12.0]
    assert part[3]["at"] == [9.5, 10.0, 11.0, 12.0]  # what was predicted fills the window
    assert part[3]["bands"][0]["low"][::3] == rate["bands"][0]["low"][:1] * 2
    odd = client.get(f"{address}/curves", params={"from": "x", "to": "nan"}).json()["plots"]
    assert odd[0]["at"] == drawn["Loss"]["at"]
    assert "step 30 of 30" in page and "20.0 ms" in page and "21 ms" in page
    assert "report.html" in page and "def &lt;script&gt;main():" in page
    assert "data-live=" not in page
    old = client.get("/runs/report-3")
    assert old.status_code == 200 and "before" in old.text
    assert client.get("/runs/0123456789abcdef").status_code == 404


def test_two_runs_stand_side_by_side(client: TestClient, home: Path) -> None:
    a, b = (run_id(home / "runs" / name) for name in ("done", "alive"))
    page = client.get("/compare", params={"a": a, "b": b}).text
    assert f'A: <a href="/runs/{a}">done</a>' in page
    assert f'B: <a href="/runs/{b}">alive</a>' in page
    assert "30 of 30" in page and "7 of 30" in page
    assert "<code>model</code>" in page and "shoal-8m" in page and "<code>seed</code>" not in page
    assert page.count(" selected>") == 2 and "live.js" in page  # one of them goes on
    drawn = client.get("/compare/curves", params={"a": a, "b": b}).json()["plots"]
    assert [line["name"] for line in drawn[0]["series"]] == [
        "A: done",
        "B: alive",
        "A: done, held-out",
    ]
    assert drawn[0]["series"][1]["values"][5:9] == [7.0 / 6, 1.0, None, None]
    part = client.get("/compare/live", params={"a": a, "b": b})
    assert part.headers["x-run-state"] == "running" and "<h1" not in part.text
    same = client.get("/compare", params={"a": a, "b": a}).text
    assert "both jobs have the same choices" in same
    half = client.get("/compare", params={"a": a}).text
    assert half.count(" selected>") == 1 and "Side by side" not in half
    for query in ({"a": a, "b": "0123456789abcdef"}, {"a": "<b>", "b": b}):
        assert client.get("/compare", params=query).status_code == 404


def test_a_live_run_gives_its_changing_part_alone(client: TestClient, home: Path) -> None:
    root = home / "runs" / "alive"
    page = client.get(f"/runs/{run_id(root)}").text
    assert f'data-live="/runs/{run_id(root)}/live"' in page and ">Reload</a>" in page
    part = client.get(f"/runs/{run_id(root)}/live")
    assert part.headers["x-run-state"] == "running"
    assert "<html" not in part.text and "step 7 of 30" in part.text
    assert "Measured so far" in part.text
    so_far = re.search(r"time of all steps.*", part.text)
    assert so_far is not None and "%" not in so_far[0]  # it is not over yet
    write_events(root, step(7, loss="nan"), more=True)
    with (root / "events.jsonl").open("a") as file:
        file.write("no event\n" + '{"kind": "step", "st')  # the last line is being written
    part = client.get(f"/runs/{run_id(root)}/live").text
    assert "step 8 of 30" in part and "1 invalid lines of its events were skipped" in part
    write_events(root, start(), *map(step, range(7)))  # as before, for the others


def test_states_by_heartbeat(home: Path, client: TestClient) -> None:
    root = home / "runs" / "alive"
    beat(root, 3600)
    assert "failed" in client.get(f"/runs/{run_id(root)}/live").text
    beat(root, 1, rank=1)  # one rank is enough
    assert "running now" in client.get(f"/runs/{run_id(root)}/live").text
    RunDir(root).beat(1).unlink()
    (root / "ranks" / "rank-0.error").write_text('{"type": "X", "message": "no <i>text</i>"}')
    beat(root, 3600)
    assert "no &lt;i&gt;text&lt;/i&gt;" in client.get(f"/runs/{run_id(root)}").text
    (root / "ranks" / "rank-0.error").unlink()


def test_plans_of_runs_and_files(home: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    plan_of("by-hand").save(good)
    bad.write_text("job: [1]\n")
    client = client_of(settings(home, plans=(good, bad, tmp_path / "none.yaml")))
    page = client.get("/plans").text
    assert "good.yaml" in page and "cannot be read" in page and "bad.yaml" in page
    one = client.get("/plans/file/0").text
    assert "matmul" in one and "15 ms" in one and "global_batch" in one
    assert "fastest &lt;b&gt;of&lt;/b&gt; two" in one
    assert client.get("/plans/file/1").status_code == 422
    for place in ("/plans/file/3", "/plans/file/-1", "/plans/file/x", "/plans/nothing"):
        assert client.get(place).status_code == 404
    for name in ("done", "killed"):
        assert "activations" in client.get(f"/plans/{run_id(home / 'runs' / name)}").text


def test_score_filters_by_quantity(client: TestClient) -> None:
    assert 'data-plots="/score/curves"' in client.get("/score").text
    drawn = {one["title"]: one for one in client.get("/score/curves").json()["plots"]}
    assert {"Step time", "Tokens per second"} <= set(drawn)
    time_ = drawn["Step time"]
    assert time_["log"] == [True, True] and time_["at"] == sorted(time_["at"])
    points, agree = time_["series"]
    assert not points["line"] and len(time_["at"]) == len(points["values"])
    # What does not count in the score is not drawn.
    measured = [y for y in points["values"] if y is not None]
    assert sorted(measured) == pytest.approx([21.0, 25.0])
    assert agree["dashed"] and time_["bands"][0]["colour"] == 1
    only = client.get("/score", params={"quantity": "memory_bytes"}).text
    assert "MB" in only and "MiB" not in only
    assert client.get("/score", params={"page": "99999", "quantity": "x"}).status_code == 200


def test_long_lists_have_pages(home: Path, tmp_path: Path) -> None:
    score = Score(tmp_path / "score.db")
    for number in range(60):
        score.register(tmp_path / f"run-{number}", "train", f"run-{number}")
    client = client_of(settings(home, score=tmp_path / "score.db"))
    first, last = client.get("/runs").text, client.get("/runs", params={"page": "3"}).text
    assert "1 to 25 of 60" in first and 'rel="next" href="/runs?page=2"' in first
    assert "51 to 60 of 60" in last and 'rel="next"' not in last
    for wanted in ("0", "-1", "x", "9" * 30, "٣"):
        assert client.get("/runs", params={"page": wanted}).status_code == 200


def test_directories_of_runs_can_be_given(home: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    make_run(Score(tmp_path / "other.db"), elsewhere / "foreign")
    (elsewhere / "no-run").mkdir()
    (elsewhere / "linked").symlink_to(home / "runs" / "done")
    empty = tmp_path / "score.db"
    client = client_of(settings(home, runs=(elsewhere,), score=empty))
    page = client.get("/runs").text
    assert ">foreign<" in page and "1 to 1 of 1" in page and "shoal-4m" in page
    assert "step 30 of 30" in client.get(f"/runs/{run_id(elsewhere / 'foreign')}").text
    gone = client_of(settings(home, runs=(tmp_path / "gone",), score=empty))
    answer = gone.get("/runs")
    assert answer.status_code == 503 and "--runs" in answer.text


def test_a_store_of_a_newer_version_is_told(home: Path, tmp_path: Path) -> None:
    Score(tmp_path / "score.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "score.db")) as connection:
        connection.execute("PRAGMA user_version=99")
    client = client_of(settings(home, score=tmp_path / "score.db"))
    for path in ("/runs", "/score", "/plans"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert "newer version" in answer.text and "Traceback" not in answer.text
    overview = client.get("/")
    assert overview.status_code == 200 and "newer version" in overview.text


def test_an_edited_results_file_is_shown_as_such(home: Path, tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "results" / "learning_curves.json"
    raw = json.loads(source.read_text())
    (tmp_path / "learning_curves.json").write_text(json.dumps(raw))
    client = client_of(settings(home, results=tmp_path))
    assert "badge-works" in client.get("/claims").text
    raw["verdict"]["status"], raw["seed"] = "works", raw["seed"] + 1
    time.sleep(0.01)
    (tmp_path / "learning_curves.json").write_text(json.dumps(raw))
    page = client.get("/claims").text
    assert "badge-edited" in page
    assert "edited after it was written" in page or "does not follow from its samples" in page
    only = client.get("/claims/status/edited").text
    assert "1 of 146 papers" in only
    row = re.search(r'href="(/claims/\d+)">LearningCurves', only)
    assert row is not None
    assert "edited" in client.get(row[1]).text
    assert client.get("/claims/results/learning_curves.json").json()["seed"] == raw["seed"]
    for path in ("9999", "x", "status/x", "kind/x", "results/x.json", "results/..%2fx.json"):
        assert client.get(f"/claims/{path}").status_code == 404


def test_without_anything_each_page_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    client = client_of(DashboardSettings(results=tmp_path / "none"))
    first = (
        "shoal probe",
        "shoal probe",
        "shoal train",
        "--out",
        "16xH100",
        "4xH100",
        "No scores yet",
    )
    for path, result in zip(PAGES, (*first, "shoal serve", "146"), strict=True):
        answer = client.get(path)
        assert answer.status_code == 200 and result in answer.text, path


# Who may see it


def test_events_are_read_once(tmp_path: Path) -> None:
    events = Events(tmp_path)
    events.refresh()
    assert events.steps == {} and events.last == {}
    write_events(tmp_path, start(), *map(step, range(1000)))
    events.refresh()
    xs, ys = events.curve("loss")
    assert len(xs) == 250 and xs[0] == 1.5 and ys[0] == pytest.approx(7 * 25 / 12 / 4)
    write_events(tmp_path, {**start(), "step": 900, "resumed": True}, step(900, 0.5), more=True)
    events.refresh()
    assert len(events.steps) == 1000 and events.steps[900]["loss"] == 0.5 and events.starts == 2
    write_events(tmp_path, start(), step(0))  # another run in its place
    events.refresh()
    assert list(events.steps) == [0]


# The server behind it


def test_server_page_and_chat_go_through_the_dashboard(home: Path, upstream: Upstream) -> None:
    client = client_of(settings(home, server=upstream))
    page = client.get("/server").text
    assert "ready" in page and "tiny" in page and "1,234" in page and "100 ms" in page
    assert "running requests" in page
    own = {"origin": BASE}
    said = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    answer = client.post(CHAT, json=said, headers=own)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line.get("text", "") for line in lines) == "You said: hello <b>&"
    assert lines[-1] == {"done": True}
    assert Serve.asked[-1]["messages"] == said["messages"] and Serve.asked[-1]["stream"] is True
    assert Serve.asked[-1]["max_tokens"] == 100
    turns = [("user", "a" * 300), ("assistant", "b" * 290), ("user", "c" * 300)]
    turns += [("assistant", "d" * 5), ("user", "e" * 5)]
    long = {"model": "tiny", "messages": [{"role": r, "content": c} for r, c in turns]}
    client.post(CHAT, json=long, headers=own)
    kept = Serve.asked[-1]["messages"]
    assert [message["content"][0] for message in kept] == ["c", "d", "e"]  # 600 letters fit
    form = client.post(CHAT, data={"model": "tiny", "message": "by <form>"}, headers=own).text
    assert "You said: by &lt;form&gt; &lt;b&gt;&amp;" in form
    for words, result in (("refuse", "too many requests"), ("break off", "broke off")):
        said["messages"] = [{"role": "user", "content": words}]
        last = client.post(CHAT, json=said, headers=own).text.splitlines()[-1]
        assert result in json.loads(last)["error"]
        page = client.post(CHAT, data={"model": "tiny", "message": words}, headers=own).text
        assert result in page
    assert Serve.keys == {f"Bearer {KEY}"}
    for text in (page, form, answer.text, client.get("/").text, repr(upstream)):
        assert KEY not in text


def test_an_answer_that_nobody_reads_ends(home: Path, upstream: Upstream) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    chosen = settings(home, server=upstream)
    host = f"127.0.0.1:{listening.getsockname()[1]}"
    said = {"model": "tiny", "messages": [{"role": "user", "content": "endless"}]}
    headers = {
        "origin": f"http://{host}",
        "content-type": "application/json",
        "cookie": f"{chosen.access.name}={chosen.access.cookie}",
    }
    with running(chosen, listening):
        connection = http.client.HTTPConnection(host, timeout=10)
        connection.request("POST", CHAT, json.dumps(said), headers)
        answer = connection.getresponse()
        assert answer.status == 200 and b"on and on" in answer.readline()
        answer.close()
        connection.close()
        assert Serve.gone.wait(10)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"model": "tiny", "messages": []}',
        b'{"model": 1, "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "tiny", "messages": [{"role": "system", "content": "x"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": " "}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": ["x"]}]}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_conversation_is_refused(home: Path, upstream: Upstream, body: bytes) -> None:
    client = client_of(settings(home, server=upstream))
    headers = {"origin": BASE, "content-type": "application/json"}
    assert client.post(CHAT, content=body, headers=headers).status_code == 400


def test_a_server_that_is_away_is_told(home: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = Upstream(f"http://127.0.0.1:{free.getsockname()[1]}")
    client = client_of(settings(home, server=away))
    for path in ("/", "/server"):
        answer = client.get(path)
        assert answer.status_code == 200 and "does not answer" in answer.text
    with pytest.raises(ServeError, match="does not answer"):
        list(away.stream("tiny", [{"role": "user", "content": "x"}]))


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://x", "http://", "http://u:p@x", "http://x:99999", "http://x?k=1"],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--server"):
        Upstream(url)


# The command


@pytest.mark.slow
def test_the_command_prints_its_address_and_ends(home: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "shoal", "dash", "--no-open", "--results", str(tmp_path)]
    words += ["--port", "0"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", address)
        port = int(address.split(":")[2].split("/")[0])
        taken = subprocess.run(
            [*words[:-1], str(port)], capture_output=True, text=True, check=False, timeout=60
        )
        assert taken.returncode == 2 and "--port 0" in taken.stderr
        assert "Traceback" not in taken.stderr
        answer = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        answer.request("GET", HEALTH)
        assert answer.getresponse().read() == b"ok\n"
        answer.close()
    finally:
        process.terminate()
        _, result = process.communicate(timeout=20)
    assert "Traceback" not in result and address.split("=")[1] not in result


def test_the_command_refuses_what_is_not_there() -> None:
    plain = {"results": Path("results"), "host": "127.0.0.1", "port": 0, "open_": False}
    for given in ({"runs": [Path("nowhere")]}, {"plan": [Path("none.yaml")]}, {"server": "here"}):
        with pytest.raises(ConfigError, match=f"--{next(iter(given))}"):
            dash(**{"runs": None, "plan": None, "server": None, **plain, **given})
