"""A Ray cluster of which a node that works is killed, below a run or a server."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import psutil
from soak_command import MARK, SHOAL, WAIT_S, Command, WrongError, marked, until
from soak_serving import NODE, Serving
from soak_training import MODES, TRAIN, Training, digest, events


class Cluster:
    """Three nodes of a Ray cluster on this machine, each with one processor."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.draw = draw
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.temporary = Path(tempfile.mkdtemp(prefix="r", dir=folder))
        self.marks = [uuid.uuid4().hex for _ in range(3)]
        # Nobody else may join; the commands inherit it.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))

    def start(self) -> None:
        """Start the nodes."""
        for number, mark in enumerate(self.marks):
            place = self.temporary / str(number)
            place.mkdir()
            head = ["--head", f"--port={self.port}", "--include-dashboard=false"]
            head += [f"--temp-dir={self.temporary / 'ray'}"]
            with (place / "log").open("w") as log:
                subprocess.Popen(
                    [
                        *(SHOAL.replace("shoal", "ray"), "start", "--block", "--num-cpus=1"),
                        *(["--address", self.address] if number else head),
                        *("--node-ip-address=127.0.0.1", "--object-store-memory=80000000"),
                    ],
                    env={
                        **os.environ,
                        MARK: mark,
                        "TMPDIR": str(place),
                        "OMP_NUM_THREADS": "1",
                        "RAY_USAGE_STATS_ENABLED": "0",
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self.wait_for(place / "log", "started")

    def wait_for(self, log: Path, text: str) -> None:
        """Wait until it is written."""
        deadline = time.monotonic() + WAIT_S
        while text not in log.read_text():
            if time.monotonic() > deadline:
                raise WrongError(f"no Ray node: {log.read_text()[-2000:]}")
            time.sleep(0.1)

    def kill_one(self, module: str) -> None:
        """End all processes of a node, but the first, that runs a module."""
        working = [mark for mark in self.marks[1:] if module in words_of(mark)]
        if not working:
            raise WrongError(f"no node but the first runs {module}")
        for process in marked(self.draw.choice(working)):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def close(self) -> None:
        """End all; WrongError if a process of Shoal is on a node although its command ended."""
        deadline = time.monotonic() + 60
        while results := [w for mark in self.marks for w in words_of(mark) if "shoal." in w]:
            if time.monotonic() > deadline:
                raise WrongError(f"left behind on Ray nodes: {results}")
            time.sleep(0.1)

    def kill(self) -> None:
        """End whatever is left of it."""
        for mark in self.marks:
            for process in marked(mark):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)


def words_of(mark: str) -> list[str]:
    """Arguments of all processes with a mark."""
    words = []
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            words += process.cmdline()
    return words


class OnRay:
    """Trials on a cluster of which a node is lost."""

    def __init__(self, training: Training, serving: Serving) -> None:
        self.training, self.serving = training, serving
        self.draw, self.tally = training.draw, training.tally

    def trial(self, number: int) -> str:
        """A run or a server; what came of it."""
        cluster = Cluster(self.training.folder, self.draw)
        try:
            cluster.start()
            if self.draw.random() < 0.5:
                self.serving.cluster = cluster
                line = f"on Ray, {self.serving.strike(NODE)}"
            else:
                line = self.run(number, cluster)
            cluster.close()
        finally:
            self.serving.cluster = None
            cluster.kill()
        return line

    def run(self, number: int, cluster: Cluster) -> str:
        """A run that goes on by itself on the nodes that are left."""
        folder = self.training.folder
        run = folder / f"run-{number}"
        mode = self.draw.choice(MODES)
        words = [*TRAIN, "--dir", str(run), "--set", f"checkpoint.mode={mode}"]
        words += ["--launch", "ray", "--restarts", "1"]
        command = Command(folder, *words, variables={"RAY_ADDRESS": cluster.address})
        try:
            until(lambda: any(e["kind"] == "step" for e in events(run)), command)
            time.sleep(self.draw.uniform(0.0, 0.5))
            cluster.kill_one("shoal.train.torchrun")
            if (status := command.wait()) != 0:
                raise WrongError(f"{NODE}: ended with {status}: {command.printed()[-2000:]}")
        finally:
            command.kill()
        self.training.verify(run)
        if digest(run) != self.training.expected:
            raise WrongError(f"mode {mode}, {NODE}: other weights than a run that nothing struck")
        self.tally[NODE] += 1
        return f"on Ray, train, {mode}: {NODE}"
