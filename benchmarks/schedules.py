"""Layouts of twelve thousand ranks, and a thousand-rank pipeline simulated, in fresh processes.

Usage: python benchmarks/schedules.py
"""

from __future__ import annotations

import json
import subprocess
import sys

from common import Row, record, require_quiet

LAYOUT = """
import json, sys, time
from shoal.ir.job import Parallel
split = Parallel(dp=12, pp=16, tp=8, cp=8)
begin = time.perf_counter()
grids = split.attention(), split.experts()
groups = [grid.groups(axis) for grid in grids for axis, _ in grid.axes]
seconds = time.perf_counter() - begin
assert split.world == 12288 and all(len(g) * len(g[0]) == 12288 for g in groups)
print(json.dumps([seconds, "torch" in sys.modules]))
"""

SIMULATE = """
import json, resource, sys, time
from shoal.cost.pipeline.simulator import simulate
from shoal.ir.schedule import OpCosts
from shoal.plan.schedules import SCHEDULES
part = SCHEDULES.build("interleaved")
built = time.perf_counter()
schedule = part.build(1024, 512, 2)
begin = time.perf_counter()
timeline = simulate(schedule, OpCosts.uniform(2048))
seconds = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([seconds, begin - built, peak, len(timeline), "torch" in sys.modules]))
"""


def fresh(program: str) -> list[float]:
    """What a program prints, run in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    values: list[float] = json.loads(done.stdout)
    return values


def main() -> None:
    """Measure both, each the median of five processes."""
    require_quiet()
    layouts = sorted(fresh(LAYOUT) for _ in range(5))
    simulations = sorted(fresh(SIMULATE) for _ in range(5))
    seconds, torch_loaded = layouts[2]
    simulated, built, peak, passes, _ = simulations[2]
    assert not torch_loaded
    record(
        [
            Row(
                "layouts and all groups of 12,288 ranks",
                1e3 * seconds,
                "ms",
                "<=",
                50.0,
                "both grids, groups of every axis, without torch; median of 5 processes",
                samples={"ms": [1e3 * run[0] for run in layouts]},
            ),
            Row(
                "simulating 1,024 ranks x 512 micro-batches, interleaved",
                simulated,
                "s",
                "<=",
                5.0,
                f"{passes:,.0f} passes, 2 stages a rank; building takes another {built:.1f} s; "
                "median of 5 processes",
                samples={"s": [run[0] for run in simulations]},
            ),
            Row(
                "memory of that simulation",
                peak / 2**30,
                "GiB",
                "<=",
                1e9 / 2**30,
                "peak of the whole process, schedule included",
                samples={"GiB": [run[2] / 2**30 for run in simulations]},
            ),
        ]
    )


if __name__ == "__main__":
    main()
