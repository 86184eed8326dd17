"""One model under every way to make it smaller: bytes of each tier and step time, side by side.

Usage: python benchmarks/offloads.py [--steps N] [--rounds N] [--only NAME ...]

Each is a run of its own, as ``shoal train`` makes it; all train the same model on the same data, to
the same losses. "Everything on the device" is the run with nothing elsewhere, counted by the same
arena; rounds go forth and back over all of them, and the median round is told.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, Row, record, require_quiet

from shoal.core.files import write_json
from shoal.core.meter import read_events
from shoal.ir import TrainJob
from shoal.machine.described import load
from shoal.train.run import execute, plan_job

TABLE = RESULTS.parent / "memory" / "policies.json"
EVERYTHING = "everything on the device"
MODEL = "shoal-16m"

# All state of every parameter stays where it is: the arena counts it, and nothing moves.
_RESIDENT = {"name": "deep_optimizer_states", "stride": 0, "static_residents": 1_000_000}

POLICIES: dict[str, dict[str, Any]] = {
    EVERYTHING: {"offload": _RESIDENT},
    "recompute": {"offload": _RESIDENT, "recompute": "full"},
    "deep_optimizer_states": {"offload": {"name": "deep_optimizer_states"}},
    "superpipeline": {"offload": {"name": "superpipeline"}},
    "zero_infinity, host": {"offload": {"name": "zero_infinity", "param": "host", "optim": "host"}},
    "zero_infinity, disk": {"offload": {"name": "zero_infinity"}},
    "zero_infinity, disk, act on the host": {"offload": {"name": "zero_infinity", "act": "host"}},
    "zero_infinity, disk, recompute": {
        "offload": {"name": "zero_infinity"},
        "recompute": "full",
    },
    "fuyou": {"offload": {"name": "fuyou"}},
}


def run(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train under one policy and return its losses and what it cost."""
    job = TrainJob.model_validate(
        {
            "name": "offload",
            "model": MODEL,
            "steps": steps,
            "seq_len": 256,
            "global_batch": 8,
            "microbatch": 4,
            "precision": "fp32",
            # fuyou has used a gradient before the norm of all is known.
            "grad_clip": 0,
            "parallel": {"dp": 1},
            "optimizer": {"name": "adamw", "fused": False},
            "evaluation": {"every": 0, "final": False},
            "checkpoint": {"every": 0},
            **POLICIES[name],
        }
    )
    place = folder / "run"
    execute(plan_job(job, load("local")), place)
    events = [event for event in read_events(place / "events.jsonl") if event["kind"] == "step"]
    shutil.rmtree(place)
    tiers: dict[str, int] = {}
    for event in events:
        for tier, nbytes in event.get("tier_bytes", {}).items():
            tiers[tier] = max(tiers.get(tier, 0), nbytes)
    return {
        "losses": [event["loss"] for event in events],
        # The first steps record orders and fill places.
        "step_s": statistics.median(event["step_s"] for event in events[2:]),
        "tier_bytes": tiers,
    }


def main() -> None:
    """Train under every policy and record bytes and times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(POLICIES))
    arguments = parser.parse_args()
    require_quiet()
    result: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.only}
    with tempfile.TemporaryDirectory(prefix="shoal-offloads-") as folder:
        for turn in range(arguments.rounds):
            names = list(result)
            for name in names if turn % 2 == 0 else reversed(names):
                result[name].append(run(name, arguments.steps, Path(folder)))
                last = result[name][-1]
                print(f"{name}: {last['step_s']:.3f} s a step, {last['tier_bytes']}", flush=True)
    table = {
        name: {
            "policy": POLICIES[name],
            "losses": rounds[0]["losses"],
            "step_s": statistics.median(one["step_s"] for one in rounds),
            "rounds_s": [one["step_s"] for one in rounds],
            "tier_bytes": rounds[0]["tier_bytes"],
        }
        for name, rounds in result.items()
    }
    if set(result) != set(POLICIES):
        print(json.dumps(table, indent=1))
        return
    full = table[EVERYTHING]
    unlike = [name for name, one in table.items() if one["losses"] != full["losses"]]
    smallest = min(table, key=lambda name: table[name]["tier_bytes"]["device"])
    TABLE.parent.mkdir(exist_ok=True)
    write_json(TABLE, {"model": MODEL, "steps": arguments.steps, "policies": table})
    record(
        [
            Row(
                "ways to make a model smaller: runs with other losses",
                float(len(unlike)),
                "",
                "<=",
                0.0,
                f"of {len(table)} runs of {MODEL} in fp32, to the bit; {', '.join(unlike)}",
            ),
            Row(
                "ways to make a model smaller: device bytes of the smallest",
                table[smallest]["tier_bytes"]["device"] / full["tier_bytes"]["device"],
                "x",
                "<=",
                0.5,
                f"{smallest}, of those with everything on the device; its step takes "
                f"{table[smallest]['step_s'] / full['step_s']:.2f} times as long",
            ),
        ]
    )


if __name__ == "__main__":
    main()
