"""A hub of Hugging Face for the time of a test: the routes that fetch a snapshot."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

SHA = "0123456789abcdef0123456789abcdef01234567"
OLD = "89abcdef0123456789abcdef0123456789abcdef"

_INFO = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/(.+))?")
_TREE = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/]+)")
_FILE = re.compile(r"(?:/(datasets))?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """What it has, by kind and id, and the files that were asked for.

    Args:
        address: of the server.
        repos: (``models`` or ``datasets``, id) -> path -> content; of the revision ``old`` those
            whose names begin with ``old:``.
        gated: ids that are refused.
    """

    address: str = ""
    repos: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)
    asked: int = 0

    def files(self, kind: str, repo: str, revision: str) -> dict[str, bytes] | None:
        """Path -> content of a revision; None if there is none."""
        known = self.repos[kind, repo]
        if revision in ("main", SHA):
            return {name: data for name, data in known.items() if not name.startswith("old:")}
        if revision in ("old", OLD):
            return {name[4:]: data for name, data in known.items() if name.startswith("old:")}
        return None


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    """A server that answers until the end of the block."""
    result = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            result.asked += 1
            status, headers, body = self._found(unquote(urlsplit(self.path).path), with_body)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def _found(self, path: str, with_body: bool) -> tuple[int, dict[str, str], bytes]:
            tree, info, file = (one.fullmatch(path) for one in (_TREE, _INFO, _FILE))
            match = tree or info or file
            if match is None:
                return 404, {}, b""
            kind, repo = match[1] or "models", match[2]
            if repo in result.gated:
                return 403, {"X-Error-Code": "GatedRepo"}, b""
            if (kind, repo) not in result.repos:
                return 404, {"X-Error-Code": "RepoNotFound"}, b""
            revision = match[3] or "main"
            files = result.files(kind, repo, revision)
            if files is None:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            sha = OLD if revision in ("old", OLD) else SHA
            if tree:
                rows = [
                    {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                    for name, data in files.items()
                ]
                return 200, {"Content-Type": "application/json"}, json.dumps(rows).encode()
            if info:
                described = {"id": repo, "sha": sha, "siblings": [{"rfilename": n} for n in files]}
                return 200, {"Content-Type": "application/json"}, json.dumps(described).encode()
            if match[4] not in files:
                return 404, {"X-Error-Code": "EntryNotFound"}, b""
            data = files[match[4]]
            if with_body:
                result.sent.append(match[4])
            return 200, {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": sha}, data

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    result.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield result
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def reach(patch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Let the library of this process ask there, and keep what it fetches in ``cache``."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    for name in ("SHOAL_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        patch.delenv(name, raising=False)


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
