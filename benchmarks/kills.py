"""Kills under load: a rank or a replica of ``shoal serve`` dies every ten seconds.

Usage: python benchmarks/kills.py [--seconds N] [--every N] [--only ranks|replicas] [--loud]

Clients ask, and ask again where they are told to. Each answer must be the one that the server
gave before anything was killed, and whatever is no answer must say so in the one shape of an
error, with the time to wait.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from common import Row, record
from serving import background, random_model
from soak import Looked, look

THREADS = 6
PROMPTS = 8
# s after which a request counts as hung, and for which a restart is waited for.
HANGS_S = 60.0
CLEAR = {"engine_unavailable", "replica_lost", "overloaded"}


@dataclass(frozen=True)
class Way:
    """A server that is made of several processes, of which one is killed.

    Args:
        options: of ``shoal serve``.
        module: what the processes that are killed run.
        many: how many of them there are.
        what: one of them, in words.
    """

    options: tuple[str, ...]
    module: str
    many: int
    what: str


WAYS = {
    "ranks": Way(("--tp", "2"), "shoal.parallel.comm.processes", 2, "a tensor-parallel rank"),
    "replicas": Way(("--replicas", "2"), "shoal.serve.cluster.replica", 2, "a replica"),
}


@dataclass
class Seen:
    """What became of the requests.

    Args:
        counts: by ``answered``, ``asked again`` and ``no clear end``.
        unclear: what was no answer, and no clear error either.
        slowest_s: longest time of one exchange.
        answered_at: when answers came to requests that had been asked before, s: (asked, came).
    """

    counts: Counter[str] = field(default_factory=Counter)
    unclear: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    answered_at: list[tuple[float, float]] = field(default_factory=list)


class RefusedError(Exception):
    """The server said clearly that there is no answer now; asking again may help."""

    def __init__(self, again_s: float) -> None:
        super().__init__(again_s)
        self.again_s = again_s


def refused(error: Any, again: str | None) -> RefusedError:
    """What an error object says.

    Raises:
        ValueError: it is none of the errors that a client can act upon.
    """
    if set(error) != {"message", "type", "param", "code"} or error["code"] not in CLEAR:
        raise ValueError(f"no clear error: {error}")
    return RefusedError(float(again or 1))


def ask(place: str, model: str, prompt: list[int], kind: str) -> str:
    """The text of an answer.

    Raises:
        RefusedError: there is none now.
        ValueError: what came is neither.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0}
    body |= {"stream": kind != "whole"} | ({"logprobs": 1} if kind == "logprobs" else {})
    connection = http.client.HTTPConnection(place, timeout=HANGS_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        data = answer.read()
        if answer.status in (429, 503):
            raise refused(json.loads(data)["error"], answer.headers["Retry-After"])
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {data[:200]!r}")
        if kind == "whole":
            return str(json.loads(data)["choices"][0]["text"])
        return joined(data)
    finally:
        connection.close()


def joined(data: bytes) -> str:
    """The text of a stream's events.

    Raises:
        RefusedError: its last event is an error.
        ValueError: it does not end as streams do.
    """
    events = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise ValueError("a stream without an end")
    pieces = [json.loads(event) for event in events[:-1]]
    if pieces and "error" in pieces[-1]:
        raise refused(pieces[-1]["error"], None)
    return "".join(piece["choices"][0]["text"] for piece in pieces)


class Client(threading.Thread):
    """Asks for answers that it knows, each until it has it."""

    def __init__(
        self, place: str, model: str, known: dict[tuple[int, ...], str], seed: int
    ) -> None:
        super().__init__(daemon=True)
        self.place, self.model, self.known = place, model, known
        self.draw = random.Random(seed)
        self.over = threading.Event()
        self.seen = Seen()

    def run(self) -> None:
        """Ask, again and again."""
        while not self.over.is_set():
            prompt = self.draw.choice(list(self.known))
            kind = self.draw.choice(("whole", "stream", "logprobs"))
            while not self.answered(prompt, kind):
                pass

    def answered(self, prompt: tuple[int, ...], kind: str) -> bool:
        """Ask once; whether that was the end of it."""
        began = time.monotonic()
        try:
            text = ask(self.place, self.model, list(prompt), kind)
            if text != self.known[prompt]:
                raise ValueError(f"another answer: {text!r} instead of {self.known[prompt]!r}")
        except RefusedError as cause:
            self.seen.counts["asked again"] += 1
            self.over.wait(cause.again_s)
            return self.over.is_set()
        except (OSError, http.client.HTTPException, ValueError, KeyError) as cause:
            self.seen.counts["no clear end"] += 1
            self.seen.unclear.append(f"{kind}: {cause!r}")
        else:
            self.seen.counts["answered"] += 1
            self.seen.answered_at.append((began, time.monotonic()))
        finally:
            self.seen.slowest_s = max(self.seen.slowest_s, time.monotonic() - began)
        return True


def victims(server: psutil.Process, way: Way) -> list[psutil.Process]:
    """The processes of a server one of which is killed."""
    victims = []
    for child in server.children(recursive=True):
        try:
            if way.module in child.cmdline():
                victims.append(child)
        except psutil.NoSuchProcess:
            continue
    return victims


def numbers(url: str, name: str) -> float:
    """The sum of a metric over all that is behind an address."""
    page = urllib.request.urlopen(f"{url}/metrics", timeout=HANGS_S).read().decode()
    return sum(float(value) for value in re.findall(rf"(?m)^shoal:{name}\{{.*\}} (\S+)$", page))


def whole(url: str, server: psutil.Process, way: Way) -> bool:
    """Whether all processes are there and requests are taken."""
    if len(victims(server, way)) < way.many:
        return False
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=HANGS_S) as answer:
            data = json.loads(answer.read())
    except OSError:
        return False
    return bool(data.get("ready") == data.get("replicas"))


def until_whole(url: str, server: psutil.Process, way: Way) -> None:
    end = time.monotonic() + HANGS_S
    while not whole(url, server, way):
        if time.monotonic() > end:
            raise SystemExit(f"the server does not recover within {HANGS_S:g} s")
        time.sleep(0.05)


@dataclass
class Found:
    """What is known after all was over.

    Args:
        seen: of every client.
        killed_at: when, s.
        before: the server before the load.
        after: the server after it.
        running: requests that the server still counts when all clients have gone.
        cache: share of the cache that is still held then, summed over replicas.
        left: processes, and files in the temporary directory, once the server has ended.
    """

    seen: list[Seen]
    killed_at: list[float]
    before: Looked
    after: Looked
    running: float
    cache: float
    left: list[str]

    @property
    def outages(self) -> list[float]:
        """For each kill: s until an answer came that was asked for afterwards."""
        ends = sorted(pair for one in self.seen for pair in one.answered_at)
        return [
            min((came for asked, came in ends if asked >= at), default=at + HANGS_S) - at
            for at in self.killed_at
        ]


@contextmanager
def temporary_directory(place: Path) -> Iterator[None]:
    """What a server leaves lies in ``place``."""
    old = os.environ.get("TMPDIR")
    place.mkdir()
    os.environ["TMPDIR"] = str(place)
    try:
        yield
    finally:
        if old is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = old


def kill_under_load(folder: Path, way: Way, seconds: float, every: float) -> Found:
    """Serve, load and kill for so long; what was seen of it."""
    model = folder / "killed"
    if not model.exists():
        random_model(model, "llama")
    draw = random.Random(1)
    prompts = [tuple(draw.randrange(512) for _ in range(8 * n + 8)) for n in range(PROMPTS)]
    place_left = folder / f"left{len(list(folder.iterdir()))}"
    with temporary_directory(place_left), background(model, *way.options) as up:
        place = up.url.removeprefix("http://")
        port = place.rpartition(":")[2]
        (server,) = [c for c in psutil.Process().children() if port in c.cmdline()]
        known = {prompt: ask(place, "killed", list(prompt), "whole") for prompt in prompts}
        until_whole(up.url, server, way)
        before = look(server, time.monotonic())
        family = {server, *server.children(recursive=True)}
        clients = [Client(place, "killed", known, seed) for seed in range(THREADS)]
        for client in clients:
            client.start()
        killed_at = []
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(every, left))
            there = victims(server, way)
            family |= set(server.children(recursive=True))
            if end - time.monotonic() > 1 and there:
                killed_at.append(time.monotonic())
                os.kill(draw.choice(there).pid, signal.SIGKILL)
        until_whole(up.url, server, way)
        time.sleep(every / 2)
        for client in clients:
            client.over.set()
        for client in clients:
            client.join(2 * HANGS_S)
            if client.is_alive():
                client.seen.counts["no clear end"] += 1
                client.seen.unclear.append("a client hangs")
        time.sleep(2)  # the engine tells its numbers once a second
        after = look(server, time.monotonic())
        family |= set(server.children(recursive=True))
        running = numbers(up.url, "num_requests_(?:running|waiting|open)")
        cache = numbers(up.url, "kv_cache_usage_perc")
    _, alive = psutil.wait_procs(family, timeout=5)
    left_over = [" ".join(one.cmdline()[:4]) for one in alive]
    left_over += [str(file.relative_to(place_left)) for file in place_left.iterdir()]
    return Found([c.seen for c in clients], killed_at, before, after, running, cache, left_over)


def rows(way: Way, found: Found, every: float) -> list[Row]:
    counts: Counter[str] = sum((one.counts for one in found.seen), Counter())
    unclear = [what for one in found.seen for what in one.unclear]
    outages = found.outages
    note = (
        f"shoal serve {' '.join(way.options)}; {way.what} is killed every {every:g} s, "
        f"{len(found.killed_at)} times, while {THREADS} clients ask for whole answers and streams: "
        f"{counts['answered']:,} answers, each as before the first kill; {counts['asked again']:,} "
        "times a client was told to ask again"
    )

    def row(name: str, value: float, unit: str, most: float, more: str, **samples: Any) -> Row:
        return Row(
            name=f"{name}, {way.what} killed every {every:g} s",
            value=value,
            unit=unit,
            comparison="<=",
            threshold=most,
            note=f"{note}; {more}" if more else note,
            samples=samples or None,
        )

    left = [
        found.after.files - found.before.files,
        found.after.processes - found.before.processes,
        found.running,
        found.cache,
        len(found.left),
    ]
    return [
        row("requests without a clear end", len(unclear), "", 0.0, "; ".join(unclear[:3])),
        row(
            "slowest exchange",
            max(one.slowest_s for one in found.seen),
            "s",
            30.0,
            "asking and reading all of the answer, or of the error",
        ),
        row(
            "longest time without an answer",
            max(outages),
            "s",
            every,
            "from a kill to the end of the first answer that was asked for after it",
            outage_s=outages,
        ),
        row(
            "what is left behind",
            float(sum(max(0.0, one) for one in left)),
            "",
            0.0,
            f"descriptors {left[0]:+d} and processes {left[1]:+d} over those before the load, "
            f"requests {left[2]:g}, share of the cache held {left[3]:g}; processes and files after "
            f"the server's end: {', '.join(found.left) or 'none'}",
        ),
    ]


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--only", choices=list(WAYS))
    parser.add_argument("--loud", action="store_true", help="try it out: nothing is recorded")
    options = parser.parse_args()
    judged = []
    with tempfile.TemporaryDirectory() as name:
        for way in [options.only] if options.only else WAYS:
            result = kill_under_load(Path(name), WAYS[way], options.seconds, options.every)
            judged += rows(WAYS[way], result, options.every)
    if options.loud:
        for row in judged:
            print(f"{row.name}: {row.value:.4g} {row.unit} (<= {row.threshold:g}); {row.note}")
    else:
        record(judged)


if __name__ == "__main__":
    main()
