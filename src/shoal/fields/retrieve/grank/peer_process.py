"""A peer in a process of its own, that does what its standard input says.

One JSON object a line: the first describes the peer, each further one is a command with its
arguments, answered by one line. The end of the input ends the peer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.fields.retrieve.grank.documents import read_documents
from shoal.fields.retrieve.grank.peer import Peer
from shoal.fields.retrieve.grank.protocols import GossipSettings


def commands(peer: Peer) -> dict[str, Callable[..., Any]]:
    """What a line may ask for."""

    def rank(query: str, limit: int = 10) -> dict[str, Any]:
        begin = time.perf_counter()
        found = peer.rank(query, limit=limit)
        return {"items": [one.item for one in found], "seconds": time.perf_counter() - begin}

    def click(query: str, item: str, shown: list[str]) -> int:
        return peer.click(query, item, shown).number

    def online(value: bool) -> None:
        peer.online = value

    def state() -> dict[str, Any]:
        with peer.lock:
            have = peer.log.have()
            return {"entries": len(peer.log), "have": have, **vars(peer.stats)}

    def entries() -> list[dict[str, Any]]:
        with peer.lock:
            return [one.plain() for one in peer.log]

    return {"rank": rank, "click": click, "online": online, "state": state, "entries": entries}


def main() -> None:
    """Take part until the input ends."""
    given = json.loads(sys.stdin.readline())
    texts = read_documents(given["data"]).texts
    settings = GossipSettings(**given["settings"])
    directory = Path(given["directory"])
    with Peer(
        texts,
        directory,
        join=given["join"],
        ranker=given["ranker"],
        settings=settings,
        seed=given["seed"],
    ) as peer:
        known = commands(peer)
        print(json.dumps({"address": peer.address, "peer": peer.key.peer}), flush=True)
        for line in sys.stdin:
            command, arguments = json.loads(line)
            print(json.dumps(known[command](**arguments)), flush=True)


if __name__ == "__main__":
    try:
        main()
    except ShoalError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
