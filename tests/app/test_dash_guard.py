"""The dashboard: whom it refuses, and what it never shows."""

import asyncio
import os
import re
import socket
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from dash_home import BASE, PAGES, settings
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from shoal.app.dash.app import DashboardSettings, create_app
from shoal.app.dash.guard import CHAT, HEALTH, MAX_BODY, host_names
from shoal.cost.score import run_id
from shoal.train.runs import open_inside

pytestmark = pytest.mark.usefixtures("environment")


def paths_of(home: Path) -> list[str]:
    """An address of every route."""
    app = create_app(settings(home))
    routes = [route.path for route in app.routes if isinstance(route, APIRoute)]
    assert len(routes) == len(app.routes) > 10
    return [re.sub(r"\{\w+\}", "0", path.replace("{name}", "style.css")) for path in routes]


def test_every_route_but_health_wants_the_token(home: Path) -> None:
    stranger = TestClient(create_app(settings(home)), base_url=BASE)
    origin = {"origin": BASE}
    for path in paths_of(home):
        method = "POST" if path == CHAT else "GET"
        answer = stranger.request(method, path, headers=origin)
        assert answer.status_code == (200 if path == HEALTH else 401), path
        stranger.cookies.set("shoal-dash", "guess")
        again = stranger.request(method, path, headers=origin)
        assert again.status_code == answer.status_code
        stranger.cookies.clear()
    assert stranger.get("/nowhere").status_code == 401
    assert stranger.get("/?token=wrong").status_code == 401
    assert stranger.get("/?token=%ff&token=").status_code == 401


def test_the_token_becomes_a_strict_cookie(home: Path) -> None:
    chosen = settings(home)
    client = TestClient(create_app(chosen), base_url=BASE)
    answer = client.get("/runs", params={"token": chosen.access.token, "q": "a&b"})
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie
    assert chosen.access.token not in cookie and chosen.access.token not in answer.text
    assert 'href="/runs?q=a%26b"' in answer.text
    assert client.get("/runs").status_code == 200
    astray = client.get(f"{BASE}//evil.example/", params={"token": chosen.access.token})
    assert 'url=/evil.example/"' in astray.text
    assert chosen.access.token not in repr(chosen) and chosen.access.cookie not in repr(chosen)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
def test_other_methods_are_refused_everywhere(client: TestClient, home: Path, method: str) -> None:
    for path in [*paths_of(home), "/nowhere"]:
        if (method, path) == ("POST", CHAT):
            continue
        answer = client.request(method, path, headers={"origin": BASE})
        assert answer.status_code == 405, path
        assert answer.headers["allow"] == ("POST" if path == CHAT else "GET, HEAD")


def test_head_is_as_good_as_get(client: TestClient) -> None:
    for path in (*PAGES, HEALTH, "/assets/style.css"):
        answer = client.head(path)
        assert answer.status_code == 200 and "content-security-policy" in answer.headers


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8642",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "user@127.0.0.1",
        "127.0.0.1:x",
        "127.0.0.1/",
        "[::1",
        "",
        "10.0.0.1",
    ],
)
def test_a_foreign_host_is_refused(client: TestClient, host: str) -> None:
    for path in ("/", HEALTH, "/assets/style.css"):
        for method in ("GET", "POST", "DELETE"):
            assert client.request(method, path, headers={"host": host}).status_code == 421


def test_names_of_this_machine() -> None:
    assert host_names("127.0.0.1") == {"localhost", "127.0.0.1", "::1"}
    everywhere = host_names("0.0.0.0")
    assert socket.gethostname().lower() in everywhere and "evil.example" not in everywhere
    client = TestClient(create_app(DashboardSettings()), base_url="http://localhost:9000")
    assert client.get(HEALTH).status_code == 200  # another port: a tunnel
    assert client.get(HEALTH, headers={"host": "[::1]:8642"}).status_code == 200


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://127.0.0.1:8643", "https://127.0.0.1:8642", "file://"],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_a_foreign_origin_is_refused_for_all_verbs(
    client: TestClient, origin: str, method: str
) -> None:
    path = CHAT if method == "POST" else "/runs"
    assert client.request(method, path, headers={"origin": origin}).status_code == 403


def test_a_post_says_its_origin_and_its_length(client: TestClient) -> None:
    assert client.post(CHAT, json={}).status_code == 403
    own = {"origin": BASE}
    assert client.post(CHAT, json={}, headers=own).status_code == 404  # no server was given
    assert client.post(CHAT, content=b"x" * (MAX_BODY + 1), headers=own).status_code == 413
    assert client.post(CHAT, content=iter([b"x"]), headers=own).status_code == 413


def test_headers_let_nothing_in_from_outside(client: TestClient, home: Path) -> None:
    for path in (*PAGES, "/nowhere", "/assets/style.css", f"/runs/{'0' * 16}"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy and "*" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
    report = client.get(f"/runs/{run_id(home / 'runs' / 'done')}/report.html")
    assert report.status_code == 200 and "<!doctype html>" in report.text
    policy = report.headers["content-security-policy"]
    assert policy.startswith("sandbox; default-src 'none'") and "allow-" not in policy


def status_of(client: TestClient, path: str) -> int:
    """Status of a path that a client library would tidy up before it asks."""
    cookies = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    scope = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "http_version": "1.1",
        "headers": [(b"host", b"127.0.0.1:8642"), (b"cookie", cookies.encode())],
    }
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    asyncio.run(client.app(scope, receive, send))
    return int(sent[0]["status"])


def test_nothing_outside_a_run_is_served(client: TestClient, home: Path, tmp_path: Path) -> None:
    root = home / "runs" / "done"
    secret = tmp_path / "secret"
    secret.write_text("secret")
    run = f"/runs/{run_id(root)}"
    for name in ("report.html", "report.json", "plan.yaml", "events.jsonl"):
        assert client.get(f"{run}/{name}").status_code == 200
    for name in (
        "%2e%2e%2fplan.yaml",
        "..%2f..%2fscore.db",
        "%2e%2e/%2e%2e/score.db",
        "plan.yaml%00.html",
        "tokens.json",
        "ranks",
        "checkpoints/x",
        "/etc/passwd",
    ):
        assert client.get(f"{run}/{name}").status_code == 404, name
    for name in ("..", "../asked-to-stop/plan.yaml", "../../score.db"):
        assert status_of(client, f"{run}/{name}") == 404
        assert status_of(client, f"/assets/{name}") == 404
    for name in ("..%2fsite.py", "%2e%2e%2fsite.py", "nothing.css"):
        assert client.get(f"/assets/{name}").status_code == 404
    stopped = home / "runs" / "asked-to-stop"
    page = stopped / "report.html"
    page.unlink()
    page.symlink_to(secret)
    assert client.get(f"/runs/{run_id(stopped)}/report.html").status_code == 404
    page.unlink()
    os.mkfifo(page)
    assert client.get(f"/runs/{run_id(stopped)}/report.html").status_code == 404
    assert "report.html" not in client.get(f"/runs/{run_id(stopped)}").text
    assert open_inside(root, "../x") is None and open_inside(root, "") is None
    (stopped / "link.jsonl").symlink_to(secret)
    assert open_inside(stopped, "link.jsonl") is None and open_inside(stopped, "ranks") is None
