"""Half an hour of mixed load on ``shoal serve``: memory, descriptors and processes stay.

Usage: python benchmarks/soak.py [--minutes N] [--loud]

Streams and whole answers, chats, vectors, clients that leave in the middle, and requests that
are refused, from several threads, while the whole family of processes is looked at.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import Row, record
from serving import background, random_model

THREADS = 6
# Of the time, before anything is looked at: allocators and caches fill up at first.
WARM = 0.25


@dataclass
class Looked:
    """What was seen at one time.

    Args:
        at: s since the start.
        memory_bytes: resident memory of the server and its children.
        files: their descriptors.
        processes: how many they are.
    """

    at: float
    memory_bytes: int
    files: int
    processes: int


def look(server: psutil.Process, began: float) -> Looked:
    family = [server, *server.children(recursive=True)]
    return Looked(
        time.monotonic() - began,
        sum(one.memory_info().rss for one in family),
        sum(one.num_fds() for one in family),
        len(family),
    )


class Client(threading.Thread):
    """Sends requests of all kinds until told to stop."""

    def __init__(self, place: str, model: str, seed: int, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.place, self.model, self.over = place, model, over
        self.draw = random.Random(seed)
        self.counts = {"answered": 0, "left": 0, "refused": 0, "failed": 0}

    def run(self) -> None:
        """Ask, again and again."""
        while not self.over.is_set():
            kind = self.draw.choice(["whole", "stream", "chat", "vector", "leave", "refused"])
            try:
                self.counts[self.ask(kind)] += 1
            except (OSError, http.client.HTTPException):
                self.counts["failed"] += 1

    def ask(self, kind: str) -> str:
        """One request; what became of it."""
        draw = self.draw
        prompt = [draw.randrange(512) for _ in range(draw.randint(1, 200))]
        body: dict[str, Any] = {"model": self.model, "prompt": prompt}
        body |= {"max_tokens": draw.randint(1, 48), "stream": kind in ("stream", "leave")}
        path = "/v1/completions"
        if kind == "chat":
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": "t1 t2 t3"}]
        elif kind == "vector":
            path, body["input"] = "/v1/embeddings", prompt
        elif kind == "refused":
            body["n"] = 5_000_000
        connection = http.client.HTTPConnection(self.place, timeout=120)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            if kind == "leave":
                answer.readline()
                return "left"
            answer.read()
            expected = 400 if kind == "refused" else 200
            if answer.status != expected:
                return "failed"
            return "refused" if kind == "refused" else "answered"
        finally:
            connection.close()


def soak(folder: Path, seconds: float) -> tuple[list[Looked], dict[str, int]]:
    """Load a server for so long; what was seen of it, and what became of the requests."""
    random_model(folder / "soaked", "llama")
    over = threading.Event()
    seen: list[Looked] = []
    with background(folder / "soaked") as server:
        place = server.url.removeprefix("http://")
        port = int(place.rpartition(":")[2])
        (process,) = [
            child for child in psutil.Process().children() if str(port) in child.cmdline()
        ]
        clients = [Client(place, "soaked", seed, over) for seed in range(THREADS)]
        for client in clients:
            client.start()
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            over.wait(seconds / 120)
            seen.append(look(process, began))
        over.set()
        for client in clients:
            client.join(130)
        time.sleep(2)  # what was left behind by clients is noticed
        seen.append(look(process, began))
    names = clients[0].counts
    return seen, {name: sum(client.counts[name] for client in clients) for name in names}


def slope(seen: list[Looked]) -> float:
    """Growth of the memory after the warm-up, B/min, by the median of all pairs (Theil-Sen)."""
    kept = [one for one in seen if one.at >= WARM * seen[-1].at]
    slopes = [
        (b.memory_bytes - a.memory_bytes) / (b.at - a.at)
        for place, a in enumerate(kept)
        for b in kept[place + 1 :]
    ]
    return 60.0 * float(np.median(slopes))


def rows(seen: list[Looked], counts: dict[str, int]) -> list[Row]:
    kept = [one for one in seen if one.at >= WARM * seen[-1].at]
    minutes = seen[-1].at / 60
    note = (
        f"{minutes:.0f} minutes of {THREADS} clients: answers, streams, chats, vectors, clients "
        f"that leave and refusals: {', '.join(f'{n:,} {name}' for name, n in counts.items())}"
    )
    return [
        Row(
            name="growth of a server's memory under load",
            value=slope(seen) / 2**20,
            unit="MiB/min",
            comparison="<=",
            threshold=1.0,
            note=f"{note}; all its processes, after the first quarter, Theil-Sen",
            samples={"memory_bytes": [float(one.memory_bytes) for one in seen]},
        ),
        Row(
            name="descriptors that a server is left with after load",
            value=float(seen[-1].files - min(one.files for one in kept)),
            unit="",
            comparison="<=",
            threshold=0.0,
            note=f"{note}; at the end, over the fewest while it ran",
        ),
        Row(
            name="processes that a server is left with after load",
            value=float(seen[-1].processes - min(one.processes for one in kept)),
            unit="",
            comparison="<=",
            threshold=0.0,
            note=f"{note}; the same",
        ),
        Row(
            name="requests that failed under load",
            value=float(counts["failed"]),
            unit="",
            comparison="<=",
            threshold=0.0,
            note=note,
        ),
    ]


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--loud", action="store_true", help="try it out: nothing is recorded")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = rows(*soak(Path(name), 60 * options.minutes))
    if options.loud:
        for row in found:
            print(f"{row.name}: {row.value:.4g} {row.unit}; {row.note}")
    else:
        record(found)


if __name__ == "__main__":
    main()
