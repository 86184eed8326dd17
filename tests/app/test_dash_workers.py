"""The block inspector of the dashboard: rows of blocks, and servers that tell none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from dash_home import KEY, client_of, settings

from shoal.app.dash.workers import read
from shoal.core.errors import ServeError
from shoal.serve.watch.upstream import Upstream

pytestmark = pytest.mark.usefixtures("environment")


def block(what: str, owner: str | None, offset: int, length: int, shared: bool = True) -> object:
    return {
        "what": what,
        "owner": owner,
        "offset": offset,
        "length": length,
        "shared": shared,
    }


def worker(name: str, *more: object) -> object:
    common = block("prompt", None, 0, 40), block("header", None, 40, 3, False)
    return {"name": name, "length": 60, "blocks": [*common, *more]}


ALICE = worker("Alice", block("work", "Bob<b>", 43, 5), block("work", "Alice", 48, 12))
BOB = worker("Bob<b>", block("work", "Alice", 43, 12), block("work", "Bob<b>", 55, 5))
TOLD = {"object": "list", "data": [{"id": "chat-<1>", "workers": [ALICE, BOB]}]}


def test_rows_of_blocks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (session,) = read(json.dumps(TOLD))
    alice, bob = ([(b.owner, b.offset, b.own) for b in row.blocks[2:]] for row in session.rows)
    assert alice == [("Bob<b>", 43, False), ("Alice", 48, True)]
    assert bob == [("Alice", 43, False), ("Bob<b>", 55, True)]
    drawn = session.render()
    assert drawn.count("<rect") == 8 and drawn.count("hw-own") == 2
    assert "work in progress of Bob&lt;b&gt;: from 43, 5 tokens, shared" in drawn
    monkeypatch.setattr(Upstream, "workers", lambda _: json.dumps(TOLD))
    client = client_of(settings(home, server=Upstream("http://127.0.0.1:1", KEY)))
    page, part = client.get("/server/workers"), client.get("/server/workers/live")
    assert part.headers["x-run-state"] == "running" and "<h1" not in part.text
    for text in (page.text, part.text):
        assert text.count("<rect") == 8 and "<b>" not in text and "chat-&lt;1&gt;" in text
        assert "it alone" in text and KEY not in text
    monkeypatch.setattr(Upstream, "workers", lambda _: '{"data": []}')
    assert "No workers write now" in client.get("/server/workers").text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"data": [{"id": "x"}]}',
        '{"data": [{"id": "x", "workers": [{"name": "a", "blocks": [{"what": "odd"}]}]}]}',
        '{"data": 3}',
    ],
)
def test_what_is_no_views(text: str) -> None:
    with pytest.raises(ServeError, match="has no views of workers"):
        read(text)


def test_servers_that_do_not_tell(home: Path) -> None:
    assert client_of(settings(home)).get("/server/workers").status_code == 404
    client = client_of(settings(home, server=Upstream("http://127.0.0.1:1", KEY)))
    answer = client.get("/server/workers/live")
    assert answer.status_code == 200 and "does not answer" in answer.text
