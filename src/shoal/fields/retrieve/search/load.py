"""Clients of a server in a process of their own: they add documents, then ask.

The description is one JSON object on the standard input, and so is the result on the output.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from shoal.core import children
from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.fields.retrieve.search.protocols import SearchError

# Points of a request; seconds of a request, and of a load.
_BATCH, _TIMEOUT_S, _LOAD_S = 100, 120.0, 3600.0
# Queries before those that are timed, of each client.
_WARM = 10


def run_load(description: Mapping[str, Any]) -> dict[str, Any]:
    """Load a server from another process, so that both have a core.

    Args:
        description: ``url``; ``documents``, each (text, query); ``dim``; ``method``, ``k``,
            ``queries``, ``clients``, ``seed``.

    Returns:
        ``query_s``, seconds of each query; ``queries_s``, of all; ``upserts_s``.

    Raises:
        SearchError: a request failed; says why.
    """
    process = children.start(
        "shoal.fields.retrieve.search.load",
        stdin=-1, stdout=-1, stderr=-1, text=True,
        env=children.environment({"OMP_NUM_THREADS": "1"}),
    )  # fmt: skip
    try:
        out, errors = process.communicate(json.dumps(description), timeout=_LOAD_S)
    finally:
        process.kill()
        process.wait(timeout=_TIMEOUT_S)
    if process.returncode:
        raise SearchError(f"load: {errors.strip().splitlines()[-1:] or 'the clients ended'}")
    result: dict[str, Any] = json.loads(out)
    return result


class _Client:
    """One connection that is kept."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)

    def __call__(self, method: str, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        self._connection.request(method, path, json.dumps(body), headers)
        answer = self._connection.getresponse()
        data = json.loads(answer.read())
        if answer.status != 200:
            raise SearchError(f"{method} {path}: {data}")
        return data["result"]


def load(given: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`run_load` returns, in this process."""
    documents: Sequence[tuple[str, str]] = given["documents"]
    client = _Client(given["url"])
    client("PUT", "/collections/load", {"vectors": {"size": given["dim"]}})
    begin = time.perf_counter()
    for first in range(0, len(documents), _BATCH):
        some = documents[first : first + _BATCH]
        points = [{"id": first + at, "payload": {"text": one[0]}} for at, one in enumerate(some)]
        client("PUT", "/collections/load/points", {"points": points})
    upserts_s = time.perf_counter() - begin
    draw = generator(given["seed"], purpose="search load")
    order = draw.integers(0, len(documents), given["queries"]).tolist()
    seconds: list[float] = []
    failed: list[Exception] = []
    barrier = threading.Barrier(given["clients"] + 1)

    def ask(mine: list[int]) -> None:
        own = _Client(given["url"])

        def one(at: int) -> float:
            body = {
                "query": {"text": documents[at][1]}, "using": given["method"],
                "limit": given["k"], "with_payload": True,
            }  # fmt: skip
            begin = time.perf_counter()
            own("POST", "/collections/load/points/query", body)
            return time.perf_counter() - begin

        try:
            for at in mine[:_WARM]:
                one(at)
            barrier.wait(_TIMEOUT_S)
            seconds.extend([one(at) for at in mine])
        except (OSError, http.client.HTTPException, ConfigError, ValueError) as cause:
            failed.append(cause)
            barrier.abort()

    clients = given["clients"]
    threads = [threading.Thread(target=ask, args=(order[at::clients],)) for at in range(clients)]
    for thread in threads:
        thread.start()
    try:
        barrier.wait(_TIMEOUT_S)
    except threading.BrokenBarrierError as cause:
        raise SearchError(f"{failed[:1] or 'no answer'}") from cause
    begin = time.perf_counter()
    for thread in threads:
        thread.join(_TIMEOUT_S * len(order))
    queries_s = time.perf_counter() - begin
    if failed:
        raise SearchError(str(failed[0]))
    return {"query_s": seconds, "queries_s": queries_s, "upserts_s": upserts_s}


def main() -> None:
    """Load the server that the input describes."""
    print(json.dumps(load(json.loads(sys.stdin.read()))))


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, OSError, http.client.HTTPException) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
