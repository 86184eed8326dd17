"""How quick the dashboard's pages are with 1,000 runs in the store.

Usage: python benchmarks/dashboard.py [--runs 1000] [--rounds 20] [--dry]

Fills a temporary home with reports and run directories as training leaves them, starts
``shoal dash`` as a process of its own and times every page over HTTP, one request after
another and one connection each. ``--dry`` prints without recording.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from common import Row, record, require_quiet

from shoal.cost.score import Score, run_id
from shoal.ir import Estimate, Interval, Machine, TrainJob, TrainPlan
from shoal.machine.described import load
from shoal.train.layout import RunDir
from shoal.train.report import make_report, write_page

LIMIT_S = 0.3
MODELS = ("shoal-0.3m", "shoal-1m", "shoal-4m", "shoal-8m")
# Of so many runs one was killed and has no report.
LOST_EVERY = 50


def machine() -> Machine:
    """The probed machine of this host with all its measurements, or a described one."""
    from shoal.core.files import shoal_home

    path = shoal_home() / "machine.yaml"
    return Machine.load(path) if path.exists() else load("laptop")


def plan(number: int, here: Machine) -> TrainPlan:
    """The plan of a run."""
    from shoal.cost.shapes import find

    model = MODELS[number % len(MODELS)]
    job = TrainJob(name=f"run-{number:04d}", model=model, steps=300)
    cost = Estimate(
        step_s=Interval.around(0.03 * (1 + number % 7), 0.2),
        terms_s={"matmul": 0.02, "memory": 0.006, "overhead": 0.004},
        memory_bytes={"weights": 2e7, "gradients": 2e7, "optimizer": 4e7, "runtime": 3e8},
        tokens=4096,
        total_s=Interval.around(9.0 * (1 + number % 7), 0.2),
        bound="compute",
    )
    return TrainPlan(job=job, machine=here, shape=find(model), estimate=cost, why="fastest of 104")


def events(number: int, steps: int = 300) -> str:
    """What a run writes while it trains."""
    rng = random.Random(number)
    begin = 1.7e9 + 60 * number
    step_s = 0.03 * (1 + number % 7) * rng.uniform(0.8, 1.25)
    lines: list[dict[str, object]] = [
        {"time": begin, "kind": "start", "step": 0, "total": steps, "ranks": 2, "resumed": False}
    ]
    for step in range(steps):
        seconds = step_s * rng.uniform(0.95, 1.1)
        lines.append(
            {
                "time": begin + step * step_s,
                "kind": "step",
                "step": step,
                "loss": 7 / (1 + step / 40) ** 0.4 + rng.uniform(-0.1, 0.1),
                "grad_norm": rng.uniform(0.3, 1.2),
                "lr": 3e-3,
                "step_s": seconds,
                "tokens_per_s": 4096 / seconds,
                "mfu": 0.3 * 0.03 / seconds,
                "memory_bytes": 4e8,
            }
        )
    ended = {"time": begin + steps * step_s, "step": steps}
    if number % LOST_EVERY:
        lines.append({**ended, "kind": "end"})
    return "".join(json.dumps(line) + "\n" for line in lines)


def fill(home: Path, count: int) -> list[str]:
    """Runs in a home; their ids."""
    here = machine()
    here.save(home / "machine.yaml")
    score = Score(home / "score.db")
    page = ""
    results = []
    for number in range(count):
        directory = RunDir(home / "runs" / f"run-{number:04d}")
        directory.root.mkdir(parents=True)
        chosen = plan(number, here)
        results.append(run_id(directory.root))
        directory.events.write_text(events(number))
        # JSON is YAML too, and a thousand plans are written in seconds.
        directory.plan.write_text(chosen.model_dump_json(exclude_none=True))
        score.register(directory.root, "train", chosen.job.name, chosen.job.model)
        if number % LOST_EVERY == 0:
            continue
        report = make_report(chosen, directory)
        if not page:
            write_page(report, directory)
            page = directory.page.read_text()
        directory.page.write_text(page)
        directory.report.write_text(report.model_dump_json())
        score.append(report, directory.root)
    return results


def timed(address: str, path: str, cookie: str) -> float:
    """S from the request to the last byte of a page."""
    begin = time.perf_counter()
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.request("GET", path, headers={"cookie": cookie})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"{path}: status {answer.status}")
    return time.perf_counter() - begin


def enter(start: str) -> str:
    """The cookie that the start address gives."""
    connection = http.client.HTTPConnection(urlsplit(start).netloc, timeout=60)
    connection.request("GET", f"/?{urlsplit(start).query}")
    cookie = connection.getresponse().getheader("set-cookie", "")
    connection.close()
    return str(cookie).partition(";")[0]


def measure(count: int, rounds: int) -> dict[str, list[float]]:
    """Page -> s of each request; the first of them finds cold caches."""
    with tempfile.TemporaryDirectory(prefix="shoal-dash-") as folder:
        home = Path(folder)
        ids = fill(home, count)
        command = [sys.executable, "-m", "shoal", "dash", "--no-open", "--port", "0"]
        command += ["--results", str(Path(__file__).parents[1] / "results")]
        process = subprocess.Popen(
            command,
            env={**os.environ, "SHOAL_HOME": str(home)},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            start = process.stdout.readline().strip()
            cookie = enter(start)
            address = start.partition("?")[0]
            pages = {
                "overview": ["/"],
                "machine": ["/machine"],
                "runs, first page": ["/runs"],
                "runs, last page": [f"/runs?page={-(-count // 25)}"],
                "runs, filtered": ["/runs?q=shoal-4m"],
                # Another run each time, so that no cache helps.
                "a run": [f"/runs/{run}" for run in ids[1:]],
                "a run without a report": [f"/runs/{run}" for run in ids[::LOST_EVERY]],
                "plans": [f"/plans?page={1 + page}" for page in range(count // 25)],
                "a plan": [f"/plans/{run}" for run in ids[1:]],
                "score": ["/score", "/score?quantity=step_s&page=9"],
                "server": ["/server"],
                "claims": ["/claims"],
                "a claim": ["/claims/48", "/claims/77", "/claims/3"],
            }
            return {
                name: [
                    timed(address, paths[number % len(paths)], cookie) for number in range(rounds)
                ]
                for name, paths in pages.items()
            }
        finally:
            process.terminate()
            process.wait(20)


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dry", action="store_true", help="print only")
    options = parser.parse_args()
    if not options.dry:
        require_quiet()
    result = measure(options.runs, options.rounds)
    for name, seconds in result.items():
        print(
            f"{name:24} first {1e3 * seconds[0]:6.1f} ms, median "
            f"{1e3 * statistics.median(seconds):6.1f} ms, slowest {1e3 * max(seconds):6.1f} ms"
        )
    slowest = max(result, key=lambda name: max(result[name]))
    medians = {name: statistics.median(seconds) for name, seconds in result.items()}
    row = Row(
        name="slowest page of the dashboard",
        value=max(result[slowest]),
        unit="s",
        comparison="<=",
        threshold=LIMIT_S,
        note=f"{options.runs} runs in the store, {options.rounds} requests of each of "
        f"{len(result)} pages over HTTP, cold ones among them; the slowest request of all was "
        f"{slowest!r}; medians from {1e3 * min(medians.values()):.0f} to "
        f"{1e3 * max(medians.values()):.0f} ms",
        samples=result,
    )
    if not options.dry:
        record([row])


if __name__ == "__main__":
    main()
