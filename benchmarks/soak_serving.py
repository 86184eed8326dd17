"""Servers under load that a fault strikes: no answer is wrong, and none that was let in is lost."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from soak_command import WAIT_S, Command, WrongError, until

if TYPE_CHECKING:
    from soak_ray import Cluster

NODE = "Ray node killed"
KILLED = ("server killed", "router killed")  # no request outlives these
QUESTIONS = ["import os\n", "def f(x):\n", "class A:\n", "for i in range(", "return ", "# a"]


class Serving:
    """Trials of a server."""

    def __init__(self, model: Path, folder: Path, draw: random.Random, tally: Counter[str]) -> None:
        self.model, self.folder, self.draw, self.tally = model, folder, draw, tally
        self.cluster: Cluster | None = None
        self.faults = ["engine killed", "engine stopped", "server killed", "server SIGTERM"]
        self.faults += ["replica killed", "router killed", "half-open connections"]
        with self.server("none") as (_, url):
            self.expected = {text: ask(url, text)[1] for text in QUESTIONS}

    @contextlib.contextmanager
    def server(self, fault: str) -> Iterator[tuple[Command, str]]:
        """A server that answers."""
        more = ["--replicas", "2"] if fault in ("replica killed", "router killed", NODE) else []
        if fault == NODE:
            assert self.cluster is not None
            more += ["--launcher", "ray", "--set", f"launcher.address={self.cluster.address}"]
        words = ["serve", str(self.model), "--port", "0", "-q", "--threads", "1"]
        command = Command(self.folder, *words, "--engine-timeout", "8", *more)
        try:
            until(lambda: "http://" in command.printed(), command)
            yield command, command.printed().split()[-1]
            command.process.terminate()
            status = command.wait()
            allowed = (-9,) if fault in KILLED else (143,)
            if status not in allowed:
                raise WrongError(f"{fault}: ended with {status}: {command.printed()[-2000:]}")
        finally:
            command.kill()

    def trial(self, number: int) -> str:
        """One server under load, struck once."""
        return self.strike(self.draw.choice(self.faults))

    def strike(self, fault: str) -> str:
        """Ask from all clients while it strikes."""
        with self.server(fault) as (command, url):
            over = threading.Event()
            seeds = [self.draw.random() for _ in range(6)]
            results: list[tuple[str, int, str]] = []
            clients = [
                threading.Thread(target=keep_asking, args=(url, seed, over, results))
                for seed in seeds
            ]
            for client in clients:
                client.start()
            time.sleep(self.draw.uniform(1.0, 4.0))
            ended = self.act(fault, command, url)
            if not ended:
                time.sleep(5.0)
                deadline = time.monotonic() + 60
                while ask(url, QUESTIONS[0])[0] != 200:
                    if time.monotonic() > deadline:
                        raise WrongError(f"{fault}: it does not answer a minute later")
                    time.sleep(0.2)
            over.set()
            for client in clients:
                client.join(WAIT_S)
                if client.is_alive():
                    raise WrongError(f"{fault}: a request hangs")
        self.judge(fault, results, ended)
        self.tally[fault] += 1
        return f"serve: {fault}, {len(results)} answers"

    def act(self, fault: str, command: Command, url: str) -> bool:
        """Do it; whether the server ends by it."""
        if fault == NODE:
            assert self.cluster is not None
            self.cluster.kill_one("shoal.serve.cluster.replica")
            return False
        module = (
            "shoal.serve.cluster.replica"
            if fault == "replica killed"
            else "shoal.serve.engine.process"
        )
        if fault in ("engine killed", "engine stopped", "replica killed"):
            one = self.draw.choice(command.children(module))
            one.suspend() if fault == "engine stopped" else one.kill()
            return False
        if fault == "half-open connections":
            host, port = url.removeprefix("http://").split(":")
            held = [socket.create_connection((host, int(port)), 10) for _ in range(300)]
            for connection in held:
                connection.sendall(b"GET /health HTTP/1.1\r\n")
            time.sleep(5.0)
            for connection in held:
                connection.close()
            return False
        command.process.send_signal(signal.SIGTERM if fault == "server SIGTERM" else signal.SIGKILL)
        return True

    def judge(self, fault: str, found: list[tuple[str, int, str]], ended: bool) -> None:
        """No answer is wrong, and no request that was let in is lost."""
        for text, status, answer in found:
            self.tally["answers"] += 1
            if status == 200 and answer != self.expected[text]:
                raise WrongError(f"{fault}: {text!r} was answered {answer!r}")
            if status == 0 and not (fault in KILLED or (ended and answer == "refused")):
                raise WrongError(f"{fault}: a request was lost: {answer}")
            self.tally["clear errors"] += status not in (0, 200)
            self.tally["of a killed server"] += status == 0


def ask(url: str, text: str) -> tuple[int, str]:
    """Status and answer; status 0 where the connection failed, with ``refused`` or the reason."""
    body = {"model": "export", "prompt": text, "max_tokens": 40, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return 200, json.load(answer)["choices"][0]["text"]
    except urllib.error.HTTPError as cause:
        return cause.code, cause.read().decode(errors="replace")
    except urllib.error.URLError as cause:
        refused = isinstance(cause.reason, ConnectionRefusedError)
        return 0, "refused" if refused else repr(cause.reason)
    except (OSError, ValueError) as cause:
        return 0, repr(cause)


def keep_asking(
    url: str, seed: float, over: threading.Event, found: list[tuple[str, int, str]]
) -> None:
    """Ask until told to stop."""
    draw = random.Random(seed)
    while not over.is_set():
        text = draw.choice(QUESTIONS)
        status, answer = ask(url, text)
        found.append((text, status, answer))
        if status == 0:
            over.wait(0.2)
