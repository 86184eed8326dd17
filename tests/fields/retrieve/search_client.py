"""What tests of served collections share: names, keys, and a client in this process."""

from __future__ import annotations

import asyncio
import json

from shoal.fields.retrieve.search import EMBEDDERS, Library
from shoal.fields.retrieve.search.api import create_search_app

DIM = 4
WORDS = [f"w{n}" for n in range(12)]
KEYS = {
    "whole-key": None,
    "key-of-ann": ("ann",),
    "key-of-bob": ("bob",),
    "key-of-two": ("ann", "bob"),
    "key-of-nobody": ("nobody",),
}


class Client:
    """Calls an application in this process; what it answers without its time."""

    def __init__(self, directory, **options):
        self.library = Library(directory, EMBEDDERS.build({"name": "hashed_words", "dim": 8}))
        self.app = create_search_app(self.library, **options)
        self.loop = asyncio.new_event_loop()

    def close(self):
        self.loop.run_until_complete(self.app.state.stop())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def __call__(self, method, path, body=None, *, raw=None, key="", tenant=None):
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
        headers += [(b"shoal-tenant", tenant.encode("latin-1"))] if tenant is not None else []
        data = raw if raw is not None else json.dumps(body).encode() if body is not None else b""
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "headers": headers, "http_version": "1.1",
            "scheme": "http", "server": ("localhost", 80), "client": ("localhost", 1),
        }  # fmt: skip
        sent = []

        async def receive():
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message):
            sent.append(message)

        self.loop.run_until_complete(self.app(scope, receive, send))
        answer = json.loads(b"".join(one.get("body", b"") for one in sent[1:]))
        assert answer.pop("time", 0.0) >= 0
        return sent[0]["status"], answer

    def ok(self, *args, **options):
        status, answer = self(*args, **options)
        assert status == 200 and answer["status"] == "ok", answer
        return answer["result"]

    def fails(self, status, *args, **options):
        got, answer = self(*args, **options)
        assert got == status, answer
        assert set(answer) == {"status"} and set(answer["status"]) == {"error"}
        return answer["status"]["error"]


SHOP = "/collections/shop/points"
