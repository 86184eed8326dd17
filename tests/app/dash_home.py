"""What the tests of the dashboard look at: runs as training leaves them, and a browser."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from starlette.testclient import TestClient

from shoal.app.dash.app import DashboardSettings, create_app
from shoal.app.dash.guard import DashboardAccess
from shoal.cost.score import Score, run_id
from shoal.cost.shapes import find
from shoal.ir import Estimate, Interval, TrainJob, TrainPlan
from shoal.machine.described import load
from shoal.train.layout import RunDir
from shoal.train.report import make_report, write_page
from shoal.train.watch.recorder import Recorder

BASE = "http://127.0.0.1:8642"
PAGES = ("/", "/machine", "/runs", "/plans", "/explore", "/goodput", "/score", "/server", "/claims")
KEY = "a-key-that-no-page-may-show"


def plan_of(name: str, model: str = "shoal-4m") -> TrainPlan:
    cost = Estimate(
        step_s=Interval.around(0.02, 0.2),
        terms_s={"matmul": 0.015, "memory": 0.005},
        memory_bytes={"weights": 2**24, "activations": 2**25},
        tokens=4096,
        bound="compute",
        total_s=Interval.around(0.6, 0.2),
    )
    job = TrainJob(name=name, model=model, steps=30)
    machine = load("laptop")
    return TrainPlan(
        job=job, machine=machine, shape=find(model), estimate=cost, why="fastest <b>of</b> two"
    )


def step(number: int, loss: float | str | None = None) -> dict[str, object]:
    return {
        "time": 1.0 + number,
        "kind": "step",
        "step": number,
        "loss": 7.0 / (1 + number) if loss is None else loss,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "step_s": 0.021,
        "tokens_per_s": 195_000.0,
        "mfu": 0.31,
        "memory_bytes": 2**26,
    }


def start(total: int = 30) -> dict[str, object]:
    return {
        "time": 1.0,
        "kind": "start",
        "step": 0,
        "total": total,
        "ranks": 1,
        "resumed": False,
        "parameters": 7,
    }


def write_events(root: Path, *events: dict[str, object], more: bool = False) -> None:
    text = "".join(json.dumps(event) + "\n" for event in events)
    with (root / "events.jsonl").open("a" if more else "w") as file:
        file.write(text)


def beat(root: Path, age_s: float, rank: int = 0) -> None:
    """A heartbeat of so many seconds ago."""
    path = RunDir(root).beat(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<qqqq", 1, 1, 0, time.time_ns() - int(age_s * 1e9)))


def make_run(
    score: Score,
    root: Path,
    *,
    model: str = "shoal-4m",
    steps: int = 30,
    end: str | None = "end",
    report: bool = True,
) -> str:
    """A run as training leaves it."""
    plan = plan_of(root.name, model)
    root.mkdir(parents=True)
    plan.save(RunDir(root).plan)
    score.register(root, "train", root.name, model)
    write_events(root, start(), *map(step, range(steps)))
    if end is not None:
        final = {"time": 9.0, "kind": "eval", "step": steps, "final": True, "seconds": 0.1}
        write_events(
            root,
            {**final, "loss": 1.5, "bits_per_byte": 2.0, "tokens": 9},
            {"time": 9.5, "kind": "sample", "step": steps, "text": "def <script>main():"},
            {"time": 10.0, "kind": end, "step": steps},
            {"time": 10.0, "kind": "totals", "counters": {}, "gauges": {}},
            more=True,
        )
    if report:
        result = make_report(plan, RunDir(root))
        RunDir(root).report.write_text(result.model_dump_json())
        write_page(result, RunDir(root))
        score.append(result, root)
    return run_id(root)


MS = 1_000_000


def fly(folder: Path, rank: int, world: int = 4, steps: int = 12, *, slow: int = -1) -> None:
    """What a rank records that computes 10 ms a step, or 18 where it is slow, and then sums."""
    folder.mkdir(parents=True, exist_ok=True)
    now = [0]
    recorder = Recorder(
        folder / f"rank-{rank}.flight", rank, world, capacity=512, clock=lambda: now[0]
    )
    comm = recorder.name("comm::" + ",".join(map(str, range(world))))
    op, tag = recorder.name("all_reduce"), recorder.name("gradients")
    longest = 18 if slow >= 0 else 10
    for number in range(steps):
        recorder.step = number
        base = 1 + number * (longest + 2)
        now[0] = base * MS
        with recorder.span("load"):
            now[0] += MS
        now[0] = (base + (18 if rank == slow else 10)) * MS
        entered = recorder.enter(comm, op, tag, seq=number + 1, nbytes=1 << 16)
        recorder.issued(entered)
        recorder.waited(entered)
        now[0] = (base + longest + 1) * MS
        recorder.left(entered)
    recorder.close()


def settings(home: Path, **changes: object) -> DashboardSettings:
    plain = {"results": home / "results", "access": DashboardAccess()}
    return DashboardSettings(**{**plain, **changes})


def client_of(chosen: DashboardSettings) -> TestClient:
    """A browser that has come with the token."""
    client = TestClient(create_app(chosen), base_url=BASE, follow_redirects=False)
    assert client.get("/", params={"token": chosen.access.token}).status_code == 200
    return client


@contextlib.contextmanager
def running(chosen: DashboardSettings, listening: socket.socket) -> Iterator[None]:
    """The dashboard at this socket, in a thread."""
    import uvicorn

    config = uvicorn.Config(create_app(chosen), log_level="error", access_log=False, http="h11")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(10)
