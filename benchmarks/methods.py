"""Which method for my data: every method that a plan offers, run on the same data.

Usage: python benchmarks/methods.py [KIND ...] [--dry] [--busy]

Every kind of job of the data room is planned for this machine; the first plan of each method is
run in a process of its own, and its prediction stands beside what was measured. What a plan expects
to take longer than LONGEST_S is not run, and its prediction says so.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, finish, require_quiet

import shoal
from shoal.ir import kind_of

TABLE = RESULTS.parent / "data" / "methods.json"
LONGEST_S = 30.0
# Kind -> the quantity that says how good an answer is, and (data, settings) from small to large.
CASES: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "cluster": (
        "loss",
        [
            ("photos:2000", {"k": 20}),
            ("photos:8000", {"k": 100}),
            ("photos:16000", {"k": 100, "metric": "cosine"}),
        ],
    ),
    "mine": (
        "itemsets",
        [
            ("debian", {"min_support": 0.002}),
            ("baskets:50000:10:0.5", {"min_support": 0.05}),
            ("baskets:50000:20:0.5", {"min_support": 0.05}),
            ("debian", {"min_support": 0.002, "target": "maximal"}),
        ],
    ),
    "parse_logs": ("grouping_accuracy", [("imports", {})]),
    "dedupe": ("kept_share", [("stdlib", {"threshold": 0.8})]),
    "sparse_code": (
        "free_energy",
        [("bars:2000:mca", {}), ("bars:2000:bsc", {}), ("patches:5000", {"components": 64})],
    ),
    "curate": ("kept_share", [("stdlib", {"keep": 0.7}), ("digits", {"keep": 0.7})]),
}


def measured(kind: str, data: str, settings: dict[str, Any], quality: str) -> dict[str, Any]:
    """Each method's first plan, run."""
    plans = shoal.plan(kind=kind, data=data, **settings)
    rows: dict[str, dict[str, Any]] = {}
    for plan in plans:
        name = re.split(r"\W", kind_of(plan).describe(plan))[0]
        if name in rows:
            continue
        predicted = {key: one.value for key, one in plan.predicted.items()}
        rows[name] = {"predicted": predicted, "measured": {}}
        if predicted["total_s"] > LONGEST_S:
            continue
        with tempfile.TemporaryDirectory() as folder:
            saved, run = Path(folder, "plan.yaml"), Path(folder, "run")
            plan.save(saved)
            words = [sys.executable, "-m", "shoal", "run", kind, "-q", "--plan", str(saved)]
            subprocess.run([*words, "--dir", str(run)], check=True, stdout=subprocess.DEVNULL)
            found = json.loads((run / "report.json").read_text())["measured"]
        rows[name]["measured"] = {
            key: found[key] for key in ("total_s", "memory_bytes", quality) if key in found
        }
        print(kind, data, name, predicted["total_s"], rows[name]["measured"], flush=True)
    return {"data": data, "settings": settings, "quality": quality, "methods": rows}


def main() -> None:
    """Measure the kinds that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"among {', '.join(CASES)}; all if none is named")
    parser.add_argument("--busy", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    given = parser.parse_args()
    if unknown := set(given.kinds) - set(CASES):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    if not given.busy:
        require_quiet()
    before = json.loads(TABLE.read_text())["kinds"] if TABLE.exists() else {}
    for kind in given.kinds or CASES:
        quality, cases = CASES[kind]
        before[kind] = [measured(kind, *case, quality) for case in cases]
    if given.dry:
        print(json.dumps(before, indent=1))
        return
    finish(TABLE, {"kinds": before}, [], dry=False)


if __name__ == "__main__":
    main()
