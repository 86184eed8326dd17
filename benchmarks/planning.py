"""How long a full search takes, and how much memory, each in a process of its own.

Usage: python benchmarks/planning.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from common import Row, record, require_quiet

# Name, model, machine, tokens of a sequence, sequences of a step, most seconds.
SEARCHES = (
    ("a model of 1,008 B on 3,072 devices", "GPT-1T", "3072xA100", 2048, 1536, 5.0),
    ("a model of 70 B on 64 devices", "Llama-3-70B", "64xH100", 4096, 1024, 1.0),
    ("a model of 405 B on 16,384 devices", "Llama-3.1-405B", "16384xH100", 8192, 2048, 10.0),
    ("a mixture of 671 B on 2,048 devices", "DeepSeek-V3", "2048xH100", 4096, 15360, 10.0),
)
SEARCH = """
import json, resource, sys, time
from shoal.ir import TrainJob
from shoal.machine.described import load
from shoal.plan.strategy import PLANNERS
model, machine, length, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
job = TrainJob.model_validate({"model": model, "seq_len": length, "global_batch": batch})
there = load(machine)
begin = time.perf_counter()
best = PLANNERS.build("search").plan(job, there)[0]
seconds = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([seconds, peak, best.why, best.fits, "torch" in sys.modules]))
"""
# Name, words after ``shoal plan``, most seconds of the whole command.
COMMANDS = (
    (
        "shoal plan from a cold start, 14 B on 16 devices",
        "train Qwen3-14B -m 16xH100 --tokens 20B",
        1.0,
    ),
    (
        "search for goodput under targets, 8 B on 4 devices",
        "serve Llama-3.1-8B -m 4xH100 --slo ttft=0.5,tpot=0.03",
        10.0,
    ),
)
RUNS = 5


def main() -> None:
    """Measure searches and whole commands; medians of five processes."""
    require_quiet()
    rows = []
    for name, model, machine, length, batch, most in SEARCHES:
        results = []
        for _ in range(RUNS):
            done = subprocess.run(
                [sys.executable, "-c", SEARCH, model, machine, str(length), str(batch)],
                capture_output=True,
                check=True,
            )
            results.append(json.loads(done.stdout))
        results.sort()
        seconds, peak, why, fits, torch_loaded = results[RUNS // 2]
        if not fits or torch_loaded:
            raise SystemExit(f"{name}: fits is {fits}, torch loaded is {torch_loaded}")
        text = f"{model} on {machine}, {why.split(';')[0]}; median of {RUNS} processes"
        samples = {"s": [run[0] for run in results]}
        rows.append(Row(f"full search: {name}", seconds, "s", "<=", most, text, samples=samples))
        rows.append(Row(f"memory of that search: {name}", peak / 2**30, "GiB", "<=", 1.0, text))
    for name, command, most in COMMANDS:
        cold = []
        for _ in range(RUNS):
            begin = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "shoal", "plan", *command.split()],
                capture_output=True,
                check=True,
                env={**os.environ, "COLUMNS": "120"},
            )
            cold.append(time.perf_counter() - begin)
        cold.sort()
        text = f"the whole command `shoal plan {command}`; median of {RUNS}"
        rows.append(Row(name, cold[RUNS // 2], "s", "<=", most, text, samples={"s": cold}))
    record(rows)


if __name__ == "__main__":
    main()
