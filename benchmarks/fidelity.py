"""How well the simulator predicts one engine: four traces, foretold on disk, then served.

Usage: python benchmarks/fidelity.py [--requests N] [--loud]

A rehearsal with other requests of the same trace tells what steps take in the loop, and how many
requests a second can be served; the trace then comes at twice that rate. All predictions are
written to ``results/serving/predictions.json`` before the first trace is served.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import RESULTS, Row, record, require_quiet

from shoal.core.files import write_json
from shoal.core.parts import table
from shoal.cost.serve_sim import Served, quantities, simulate
from shoal.cost.step_cost.fitted import FEATURES, Fitted, Sample, fit
from shoal.ir import Arrival, Output, ServeJob
from shoal.plan.serving import build_scheduler
from shoal.serve.bench import replay
from shoal.serve.build import engine_of, prepare
from shoal.serve.engine import Engine
from shoal.train import zoo

TABLE = RESULTS.parent / "serving" / "predictions.json"
MODEL = "shoal-4m"
POSITIONS = 1024
TRACES: dict[str, dict[str, Any]] = {
    "chat": {"name": "chat", "scale": 4.0},
    "code": {"name": "code", "scale": 2.0},
    "multiturn": {"name": "multiturn", "scale": 4.0, "think_s": 1.0},
    "shared prefix": {"name": "shared_prefix", "scale": 4.0, "prefix_tokens": 256},
}
JOB = ServeJob.model_validate(
    {
        "model": MODEL,
        "precision": "fp32",
        "threads": 1,
        "kv_tokens": 16384,
        "max_running": 32,
        "max_step_tokens": 256,
        "max_position": POSITIONS,
    }
)


class Recording(Engine):
    """An engine that keeps what its steps took."""

    steps: list[Sample]

    def step(self) -> list[Output]:
        """See :class:`Engine`."""
        began = time.perf_counter()
        outputs = super().step()
        seconds = time.perf_counter() - began
        if self.last_chunks:
            chunks = tuple((one.start, one.length) for one in self.last_chunks)
            self.steps.append(Sample(chunks=chunks, seconds=seconds))
        return outputs


def requests(workload: dict[str, Any], count: int, seed: int, rate: float) -> list[Arrival]:
    """Requests of a trace, at so many a second."""
    found: list[Arrival] = (
        table("workload")
        .build({**workload, "rate": 1.0})
        .arrivals(count=count, vocab_size=4096, max_position=POSITIONS, seed=seed)
    )
    last = found[-1].at
    return [dataclasses.replace(one, at=one.at * count / rate / last) for one in found]


def serve(model: Any, arrivals: Sequence[Arrival]) -> tuple[list[Served], list[Sample]]:
    """By a fresh engine, in real time."""
    engine, _, runner = engine_of(JOB, model)
    recording = Recording(engine.scheduler, runner, kv=engine.kv, vocab_size=engine.vocab_size)
    recording.steps = []
    return replay(recording, arrivals), recording.steps


def learned(steps: Sequence[Sample]) -> Fitted:
    """A line through steps that meets their sum."""
    line = fit(steps)
    factor = sum(one.seconds for one in steps) / sum(line.seconds(one.chunks) for one in steps)
    return line.model_copy(update={name: factor * getattr(line, name) for name in FEATURES})


def told(served: Sequence[Served]) -> dict[str, float]:
    """What is compared."""
    ttft = [one.ttft for one in served]
    return {
        "tokens_per_s": quantities(served)["tokens_per_s"],
        "ttft_p50_s": float(np.percentile(ttft, 50)),
        "ttft_p99_s": float(np.percentile(ttft, 99)),
    }


def main() -> None:
    """Rehearse, predict, serve, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400, help="of each trace")
    parser.add_argument("--loud", action="store_true", help="try it out: nothing is recorded")
    options = parser.parse_args()
    if not options.loud:
        require_quiet()
    model = prepare(JOB, zoo.random(MODEL, 0))
    serve(model, requests(TRACES["code"], 20, 9, 1000.0))  # warms up
    known: dict[str, Any] = {}
    traces: dict[str, list[Arrival]] = {}
    for name, workload in TRACES.items():
        rehearsed, steps = serve(model, requests(workload, options.requests // 2, 1, 1000.0))
        rate = 2 * quantities(rehearsed)["requests_per_s"]
        traces[name] = requests(workload, options.requests, 0, rate)
        said = told(simulate(build_scheduler(JOB), learned(steps), traces[name]).served)
        known[name] = {"workload": workload, "rate": rate, "predicted": said}
    if not options.loud:
        TABLE.parent.mkdir(exist_ok=True)
        write_json(TABLE, {"model": MODEL, "requests": options.requests, "traces": known})
    rows = []
    for name, arrivals in traces.items():
        seen, steps = serve(model, arrivals)
        measured, said = told(seen), known[name]["predicted"]
        known[name]["measured"] = measured
        for what, quantity, limit in (
            ("throughput", "tokens_per_s", 0.05),
            ("p99 time to the first token", "ttft_p99_s", 0.10),
        ):
            error = measured[quantity] / said[quantity] - 1
            rows.append(
                Row(
                    name=f"error of the simulated {what}, {name}",
                    value=abs(error),
                    unit="",
                    comparison="<=",
                    threshold=limit,
                    note=f"{MODEL}, {options.requests} requests at {known[name]['rate']:.1f} a "
                    f"second, twice what was served in a rehearsal with {options.requests // 2} "
                    f"others; foretold on disk {said[quantity]:.4g}, measured "
                    f"{measured[quantity]:.4g}: {error:+.3f}; {len(steps)} steps",
                )
            )
    if options.loud:
        print(*rows, sep="\n")
        return
    write_json(TABLE, {"model": MODEL, "requests": options.requests, "traces": known})
    record(rows)


if __name__ == "__main__":
    main()
