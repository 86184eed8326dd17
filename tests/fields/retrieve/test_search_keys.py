"""Keys of served collections, and what a request may bring."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.fields.retrieve.search_client import DIM, KEYS, SHOP, Client

from shoal.core.errors import ConfigError, ServeError
from shoal.fields.retrieve.search import SearchOptions, running_search
from shoal.fields.retrieve.search.api import LIMITS, ROUTES
from shoal.fields.retrieve.search.keys import KeyRights, KeyRing
from shoal.serve.http.guard import AccessControl


@pytest.fixture
def locked(tmp_path):
    rights = [KeyRights(key=key, tenants=names) for key, names in KEYS.items()]
    ring = KeyRing((*rights, KeyRights(key="only-reads", tenants=("ann",), write=False)))
    access = AccessControl(keys=ring.keys, key_header="api-key")
    made = Client(tmp_path / "c", keys=ring, access=access)
    made.ok("PUT", "/collections/shop", {"vectors": {"size": DIM}}, key="whole-key")
    yield made
    made.close()


def test_keys_are_of_tenants(locked):
    point = {"points": [{"id": 1, "vector": [1, 0, 0, 0]}]}
    for method, path in ROUTES:
        if path == "/health":
            assert locked(method, path) == (200, {"status": "ok"})
            continue
        for key in ("", "wrong-key"):
            locked.fails(401, method, path.replace("{name}", "shop"), key=key)
    locked.ok("PUT", SHOP, point, key="key-of-ann")
    assert locked.ok("POST", f"{SHOP}/count", {}, key="key-of-bob")["count"] == 0
    assert locked.ok("POST", f"{SHOP}/count", {}, key="only-reads")["count"] == 1
    assert locked.ok("POST", f"{SHOP}/count", {}, key="whole-key", tenant="ann")["count"] == 1
    assert locked.ok("POST", f"{SHOP}/count", {}, key="key-of-two", tenant="ann")["count"] == 1
    assert "shoal-tenant" in locked.fails(400, "POST", f"{SHOP}/count", {}, key="key-of-two")
    for tenant in ("ann", "unheard-of", ""):  # whether it exists or not
        status = 400 if not tenant else 403
        locked.fails(status, "POST", f"{SHOP}/count", {}, key="key-of-bob", tenant=tenant)
    locked.fails(403, "PUT", SHOP, point, key="only-reads")
    locked.fails(403, "POST", f"{SHOP}/delete", {"points": [1]}, key="only-reads")
    for method, path in (
        ("DELETE", "/collections/shop"), ("PUT", "/collections/x"),
        ("POST", "/collections/shop/snapshots"), ("GET", "/metrics"),
    ):  # fmt: skip
        locked.fails(403, method, path, {"vectors": {"size": 2}}, key="key-of-ann")
    assert "at most" in locked.fails(400, "POST", SHOP, {"ids": list(range(10_001))},
                                     key="whole-key")  # fmt: skip


def test_files_of_keys(tmp_path, monkeypatch):
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n- {key: key-of-ann, tenants: [ann]}\n")
    monkeypatch.setenv("SHOAL_API_KEY", "whole-key")
    ring = KeyRing.read(str(file))
    assert ring.of("key-of-ann").tenants == ("ann",) and ring.of("whole-key").tenants is None
    assert not ring.of(None).write and "key-of-ann" not in repr(ring.of("key-of-ann"))
    for text, named in (
        ("keys:\n- {tenants: [ann]}\n", "key"), ("keys: 3\n", "keys"), ("[", "keys.yaml"),
        ("keys:\n- {key: key-of-ann, tenants: []}\n", "tenants"),
        ("keys:\n- {key: key-of-ann}\n- {key: key-of-ann}\n", "twice"),
        ("keys:\n- {key: key-of-ann, tenants: ['']}\n", "tenant"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigError, match=named):
            KeyRing.read(str(file))
    with pytest.raises(ConfigError):
        KeyRing.read(str(tmp_path / "none.yaml"))
    options = SearchOptions(directory=tmp_path / "c", host="0.0.0.0", port=0)
    with pytest.raises(ServeError, match=r"0\.0\.0\.0"), running_search(options):
        pass
    options = SearchOptions(
        directory=tmp_path / "c", keys=KeyRing((KeyRights(key="short"),)), port=0
    )
    with pytest.raises(ServeError, match="8 printable"), running_search(options):
        pass


def test_more_requests_than_allowed_are_refused(tmp_path):
    made = Client(tmp_path / "c", limits=replace(LIMITS, open_requests=1, body_bytes=100))
    made.ok("PUT", "/collections/a", {"vectors": {"size": 2}})
    assert "100 B" in made.fails(413, "PUT", "/collections/a/points", {"points": [0] * 100})

    async def both():
        receive_first = asyncio.Event()
        answers = []

        async def ask(body, hold):
            async def receive():
                if hold:
                    await asyncio.wait_for(receive_first.wait(), 5)
                return {"type": "http.request", "body": body, "more_body": False}

            async def send(message):
                answers.append(message.get("status"))

            scope = {
                "type": "http", "method": "POST", "path": "/collections/a/points/count",
                "raw_path": b"", "query_string": b"", "headers": [(b"host", b"localhost")],
                "http_version": "1.1", "scheme": "http",
            }  # fmt: skip
            await made.app(scope, receive, send)

        first = asyncio.create_task(ask(b"{}", hold=True))
        await asyncio.sleep(0.01)
        await ask(b"{}", hold=False)
        receive_first.set()
        await first
        return [one for one in answers if one]

    assert made.loop.run_until_complete(both()) == [429, 200]
    made.close()
