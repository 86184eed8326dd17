"""The demo's model under every kind of split on four real ranks: one loss curve.

Usage: python benchmarks/splits.py [--steps N] [--only NAME ...] [--redraw]

Each split is a run of its own, as ``shoal train`` makes it: planned, started, measured.
Their losses are compared with those of one rank; step time, memory and bytes are what a
reader of "Which split should I choose" compares, on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, Row, record, require_quiet

from shoal.core.files import write_atomic, write_json
from shoal.core.meter import read_events
from shoal.core.svg import Chart, Series, stacked
from shoal.ir import TrainJob
from shoal.machine.described import load
from shoal.train.run import execute, plan_job

CURVES = RESULTS.parent / "curves" / "splits.json"
PICTURE = Path(__file__).parents[1] / "docs" / "assets" / "splits.svg"
AXES = ("dp", "tp", "pp", "cp")
CONTROL = "one rank, micro-batches of 4"

SPLITS: dict[str, dict[str, Any]] = {
    "one rank": {"parallel": {"dp": 1}},
    # The same sums in another order: how far rounding alone drives two runs apart.
    "one rank, micro-batches of 4": {"parallel": {"dp": 1}, "microbatch": 4},
    "dp4 zero1": {"parallel": {"dp": 4}, "shard": "zero1"},
    "dp4 zero3": {"parallel": {"dp": 4}, "shard": "zero3"},
    "dp4 hybrid": {"parallel": {"dp": 4}, "shard": {"name": "hybrid", "within": 2}},
    "dp2 tp2": {"parallel": {"dp": 2, "tp": 2}},
    "dp2 tp2 sp zero2": {"parallel": {"dp": 2, "tp": 2, "sp": True}, "shard": "zero2"},
    "dp2 pp2": {"parallel": {"dp": 2, "pp": 2}},
    "dp2 cp2 ring": {"parallel": {"dp": 2, "cp": 2, "context": "ring"}},
    "tp2 pp2 sp interleaved": {
        "parallel": {"tp": 2, "pp": 2, "vpp": 2, "sp": True, "schedule": "interleaved"}
    },
    "tp2 cp2 tokenring": {"parallel": {"tp": 2, "cp": 2, "sp": True, "context": "tokenring"}},
    "pp2 cp2 zigzag zb_h1": {"parallel": {"pp": 2, "cp": 2, "schedule": "zb_h1"}},
    "pp4 gpipe": {"parallel": {"pp": 4, "schedule": "gpipe"}, "recompute": "stage"},
    "pp4 vocab": {"parallel": {"pp": 4, "vocab": "pp"}},
    "pp2 dp2 zbv": {"parallel": {"pp": 2, "vpp": 2, "dp": 2, "schedule": "zbv"}},
    "pp2 tp2 vhalf vocab": {
        "parallel": {"pp": 2, "vpp": 2, "tp": 2, "schedule": "vhalf", "vocab": "pp"}
    },
    "cp4 zigzag": {"parallel": {"cp": 4}},
}


def run(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train one split and return its curve and what it cost."""
    job = TrainJob.model_validate(
        {
            "name": "split",
            "model": "shoal-4m",
            "steps": steps,
            "seq_len": 128,
            "global_batch": 16,
            "microbatch": 2,
            "precision": "fp32",
            "threads": 1,
            "evaluation": {"every": 0, "final": False},
            "checkpoint": {"every": 0},
            **SPLITS[name],
        }
    )
    place = folder / name.replace(" ", "-")
    report = execute(plan_job(job, load("local")), place)
    losses = [e["loss"] for e in read_events(place / "events.jsonl") if e["kind"] == "step"]
    shutil.rmtree(place)
    kept = ("step_s", "memory_bytes", "wire_bytes")
    return {
        "split": SPLITS[name],
        "losses": losses,
        "measured": {key: report.measured[key] for key in kept if key in report.measured},
        "errors": {key: report.errors[key] for key in kept if key in report.errors},
    }


def draw(found: dict[str, dict[str, Any]]) -> str:
    """All curves above each other, which look like one; below, how far each is from one rank's."""
    one = found["one rank"]["losses"]
    steps = list(range(len(one)))
    # Both charts have every series in the same order, so that the one legend is that of both.
    curves = [Series(name, steps, row["losses"]) for name, row in found.items()]
    apart = [
        Series(
            name,
            steps,
            [abs(a - b) for a, b in zip(row["losses"], one, strict=True)],
            dashed=name == CONTROL,
        )
        for name, row in found.items()
    ]
    upper = Chart(
        title=f"{len(found)} runs of one model: one rank twice, and every split of four",
        x_label="step",
        y_label="nats per token",
        series=curves,
        width=760,
        height=380,
    )
    lower = Chart(
        title=f"how far each run is from one rank (dashed: {CONTROL})",
        x_label="step",
        y_label="|difference|, nats per token",
        series=apart,
        log_y=True,
        legend=False,
        width=760,
        height=320,
    )
    return stacked([upper, lower])


def main() -> None:
    """Train every split and record how far apart the losses are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="*", default=list(SPLITS))
    parser.add_argument(
        "--redraw", action="store_true", help="draw the recorded curves; nothing runs"
    )
    arguments = parser.parse_args()
    if arguments.redraw:
        write_atomic(PICTURE, draw(json.loads(CURVES.read_text())))
        return
    require_quiet()
    with tempfile.TemporaryDirectory(prefix="shoal-splits-") as folder:
        result = {}
        for name in arguments.only:
            result[name] = run(name, arguments.steps, Path(folder))
            print(f"{name}: last loss {result[name]['losses'][-1]:.5f}", flush=True)
    if set(result) != set(SPLITS):
        print(json.dumps({name: row["measured"] for name, row in result.items()}, indent=1))
        return
    one = result["one rank"]["losses"]
    apart = {
        name: max(abs(a - b) for a, b in zip(row["losses"], one, strict=True))
        for name, row in result.items()
    }
    worst = max(apart.keys() - {CONTROL}, key=lambda name: apart[name])
    splits = [row["split"].get("parallel", {}) for row in result.values()]
    pairs = {
        pair
        for split in splits
        for pair in itertools.combinations(AXES, 2)
        if all(split.get(axis, 1) > 1 for axis in pair)
    }
    write_json(CURVES, result)
    write_atomic(PICTURE, draw(result))
    record(
        [
            Row(
                "splits of 4 real ranks: loss curves apart",
                apart[worst],
                "nats",
                "<=",
                1e-3,
                f"largest difference from one rank over {arguments.steps} steps of shoal-4m in "
                f"fp32, {len(result) - 2} splits; the worst is {worst}; one rank with other "
                f"micro-batches is {apart[CONTROL]:.1e} off",
            ),
            Row(
                "splits of 4 real ranks: pairs of axes covered",
                float(len(pairs)),
                "",
                ">=",
                6.0,
                ", ".join(f"{a} x {b}" for a, b in sorted(pairs)),
            ),
        ]
    )


if __name__ == "__main__":
    main()
