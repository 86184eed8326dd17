"""An all-to-all of a thousand hosts in the fabric simulator, in fresh processes.

Usage: python benchmarks/fabric.py
"""

from __future__ import annotations

import json
import subprocess
import sys

from common import Row, record, require_quiet

# Pairwise: 1,023 phases of 1,024 flows, over planned and over hashed paths.
PROGRAM = """
import json, resource, sys, time
from shoal.cost.network.collectives import collective, place
from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.simulate import simulate
from shoal.plan.paths.compare import plan_paths
policy, algorithm = sys.argv[1:]
fabric = LeafSpine(leaves=64, hosts=16, spines=16)
begin = time.perf_counter()
job = collective("all_to_all", place(fabric), 1e9, algorithm=algorithm)
paths = plan_paths(policy, job.flows, fabric)
planned = time.perf_counter()
found = simulate(job.flows, paths, fabric)
end = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({
    "seconds": end - begin, "plan_s": planned - begin, "peak": peak, "flows": len(job.flows),
    "events": found.events, "collective_s": job.seconds(found.phase_s),
    "torch": "torch" in sys.modules,
}))
"""


def fresh(policy: str, algorithm: str) -> dict[str, float]:
    """What the program prints, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, policy, algorithm], capture_output=True, check=True
    )
    values: dict[str, float] = json.loads(done.stdout)
    assert not values["torch"]
    return values


def main() -> None:
    """Measure each way, the median of three processes."""
    require_quiet()
    rows = []
    for policy, algorithm in (("ecmp", "pairwise"), ("split", "pairwise"), ("split", "direct")):
        runs = sorted(
            (fresh(policy, algorithm) for _ in range(3)), key=lambda found: found["seconds"]
        )
        middle = runs[1]
        what = f"all-to-all of 1,024 hosts, {algorithm}, {policy}"
        note = (
            f"{middle['flows']:,.0f} flows, {middle['events']:,.0f} events; "
            f"{middle['plan_s']:.1f} s of it choose paths; predicts "
            f"{1e3 * middle['collective_s']:.4g} ms; median of 3 processes"
        )
        rows.append(
            Row(
                f"simulating an {what}",
                middle["seconds"],
                "s",
                "<=",
                60.0,
                note,
                samples={"s": [run["seconds"] for run in runs]},
            )
        )
        rows.append(
            Row(
                f"memory of an {what}",
                max(run["peak"] for run in runs) / 2**30,
                "GiB",
                "<=",
                1e9 / 2**30,
                "peak of the whole process",
                samples={"GiB": [run["peak"] / 2**30 for run in runs]},
            )
        )
    record(rows)


if __name__ == "__main__":
    main()
