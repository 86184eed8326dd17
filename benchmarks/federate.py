"""A federation's server: its sum beside the memory's bandwidth, a thousand clients, predictions.

Usage: python benchmarks/federate.py [--updates N] [--clients N] [--wall] [--dry]

Updates of 25 million numbers are summed with two threads; what reading takes is measured in turn
with it, by the same cores, as ``shoal probe`` does. Rounds of a thousand clients run in a process
of their own, on the virtual clock, with a model whose thousand updates would not fit into the
memory that is allowed; with ``--wall`` also with processes and sockets. Predicted are the time of a
round behind links of 20 Mbit/s, and the time to a target by a pilot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, Row, finish, require_quiet

from shoal.core.measure import bootstrap, num_cores
from shoal.core.parts import Choice, table
from shoal.fields.federate.aggregate.sums import add_weighted, native
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.kind import FederateKind
from shoal.fields.running import run_here
from shoal.machine import host, load
from shoal.machine.fingerprint import fingerprint
from shoal.machine.probes.memory_bandwidth import bandwidth_samples

PARAMETERS = 25_000_000
_ROUNDS = 7
_MOST = 2e9
_LEARNER = {"name": "mlp", "width": 1000}


def summing(updates: int) -> tuple[list[Row], dict[str, Any]]:
    """The bytes that a sum reads in a second, over those that can be read."""
    if native() is None:
        raise SystemExit("nothing is compiled here")
    # As many in memory as fit; a sum that begins again with the first has none in the caches.
    held = min(updates, int(0.6 * host.memory_available() / (4 * PARAMETERS)))
    draw = np.random.default_rng(0)
    rows = [draw.random(PARAMETERS, dtype=np.float32) for _ in range(held)]
    rows = [rows[at % held] for at in range(updates)]
    weights, out = draw.random(updates), np.empty(PARAMETERS, np.float32)
    cores = tuple(sorted(host.cpus()))[:2]
    rates: dict[str, list[float]] = {"sum": [], "read": []}
    for turn in range(_ROUNDS + 1):
        begin = time.perf_counter()
        add_weighted(out, rows, weights, fresh=True, threads=len(cores))
        rate = 4.0 * PARAMETERS * updates / (time.perf_counter() - begin)
        each = 1 << 29
        read = bandwidth_samples("read", each, cores, repeats=3, sample_bytes=float(each))
        if turn:
            rates["sum"].append(rate)
            rates["read"].append(statistics.median(read))
    share = bootstrap(np.array(rates["sum"]) / np.array(rates["read"]))
    note = (
        f"weighted sum of {updates} updates of {PARAMETERS:,} float32 ({held} in memory), "
        f"{len(cores)} threads, over what the probe reads in turn with it; bytes of updates only"
    )
    row = Row(
        "federate_sum_bandwidth", share.value, "x", ">=", 0.5, note, share.low, share.high, rates
    )
    return [row], {"sum": rates, "updates": updates, "held": held}


def clients(count: int, clock: str) -> tuple[list[Row], dict[str, Any]]:
    """Memory of all processes of a run, at its peak."""
    job = {
        "clients": f"{count}",
        "rounds": 2,
        "steps": 1,
        "data": {"name": "digits", "size": 4 * count},
        "learner": _LEARNER,
        "clock": clock,
        "hosts": 8,
    }
    words = [f"{name}={json.dumps(value)}" for name, value in job.items() if name != "data"]
    options = [word for one in words for word in ("--set", one)]
    with tempfile.TemporaryDirectory(prefix="shoal-federate-") as place:
        data = json.dumps(job["data"])
        command = [sys.executable, "-m", "shoal", "run", "federate", "--set", f"data={data}"]
        begin = time.monotonic()
        run = subprocess.Popen(
            [*command, *options, "-m", "laptop", "--dir", f"{place}/run"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        peak = 0.0
        while run.poll() is None:
            peak = max(peak, _memory(run.pid))
            time.sleep(0.05)
        assert run.stderr is not None
        if run.returncode:
            raise SystemExit(run.stderr.read()[-2000:])
        seconds = time.monotonic() - begin
    size = 4.0 * table("learner").build(Choice.model_validate(_LEARNER)).shape((1, 8, 8), 10)[0]
    note = (
        f"{count} clients a round, 2 rounds, {seconds:.0f} s in all, updates of "
        f"{size / 1e6:.1f} MB; all processes, shared pages in parts"
    )
    row = Row(f"federate_{count}_clients_{clock}", peak / 1e9, "GB", "<=", _MOST / 1e9, note)
    return [row], {"peak_bytes": peak, "seconds": seconds, "update_bytes": size}


_BEHIND_LINKS: dict[str, Any] = {"clients": "4@20Mbit", "rounds": 20, "learner": "cnn_digits"}
_PREDICTED: dict[str, tuple[str, float, dict[str, Any]]] = {
    "fedavg": ("round_s", 0.15, {**_BEHIND_LINKS, "algorithm": "fedavg"}),
    "fedcompass": (
        "round_s", 0.15,
        {**_BEHIND_LINKS, "algorithm": "fedcompass", "speeds": (4.0, 6.0, 9.0, 16.0)},
    ),
    "pilot": (
        "target_s", 0.5,
        {
            "clients": "3", "learner": "logistic", "lr": 0.5, "speeds": (10.0, 20.0, 30.0),
            "algorithm": "fedavg", "target": 0.85, "rounds": 60, "pilot": True,
        },
    ),
}  # fmt: skip


def predictions() -> tuple[list[Row], dict[str, Any]]:
    """Measured over predicted seconds of runs with processes; each is run once."""
    kind, machine = FederateKind(), load("laptop")
    device = machine.device.model_copy(update={"num_cores": num_cores()})
    here = machine.model_copy(update={"device": device, "fingerprint": fingerprint()})
    rows, found = [], {}
    for name, (quantity, most, values) in _PREDICTED.items():
        plan = kind.plan(FederateJob.model_validate(values), here)[0]
        with tempfile.TemporaryDirectory(prefix="shoal-federate-") as place:
            report = run_here(plan, Path(place) / "run", kind.work(plan))
        predicted, measured = plan.predicted[quantity].value, report.measured[quantity]
        error = abs(measured / predicted - 1)
        note = f"{quantity}: predicted {predicted:.3g}, measured {measured:.3g}; {plan.why}"
        rows.append(Row(f"federate_{name}_error", error, "1", "<=", most, note))
        found[name] = {"predicted": predicted, "measured": measured}
    return rows, found


def _memory(root: int) -> float:
    """Bytes of a process and of those below it; pages that they share count in parts."""
    total, todo = 0.0, [root]
    while todo:
        pid = todo.pop()
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            tasks = Path(f"/proc/{pid}/task").iterdir()
            todo += [int(one) for task in tasks for one in (task / "children").read_text().split()]
        except OSError:  # it has ended
            continue
        total += 1024.0 * int(text.partition("\nPss:")[2].split()[0])
    return total


def main() -> None:
    """Measure, and write ``results/federate/server.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    if not given.dry:
        require_quiet()
    rows, found = summing(given.updates)
    more, virtual = clients(given.clients, "virtual")
    rows, found = [*rows, *more], {**found, "virtual": virtual}
    more, predicted = predictions()
    rows, found = [*rows, *more], {**found, "predictions": predicted}
    if given.wall:
        more, wall = clients(given.clients, "wall")
        rows, found = [*rows, *more], {**found, "wall": wall}
    finish(RESULTS.parent / "federate" / "server.json", found, rows, dry=given.dry)


if __name__ == "__main__":
    main()
