"""Which method for my data: every method that a plan offers, run on the same data.

Usage: python benchmarks/methods.py [KIND ...] [--dry] [--busy]

Every kind of job of three rooms is planned for this machine; the first plan of each method is
run in a process of its own, and its prediction stands beside what was measured. What a plan expects
to take long is not run, and its prediction says so.
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

# What a plan expects to take longer is not run.
LONGEST_S = {"data": 30.0, "retrieve": 120.0, "graph": 180.0}
Cases = list[tuple[str, dict[str, Any]]]
# Room -> kind -> the quantities that are shown, the first of which is a time, and (data, settings)
# from small to large.
CASES: dict[str, dict[str, tuple[tuple[str, ...], Cases]]] = {
    "data": {
        "cluster": (
            ("total_s", "memory_bytes", "loss"),
            [
                ("photos:2000", {"k": 20}),
                ("photos:8000", {"k": 100}),
                ("photos:16000", {"k": 100, "metric": "cosine"}),
            ],
        ),
        "mine": (
            ("total_s", "memory_bytes", "itemsets"),
            [
                ("debian", {"min_support": 0.002}),
                ("baskets:50000:10:0.5", {"min_support": 0.05}),
                ("baskets:50000:20:0.5", {"min_support": 0.05}),
                ("debian", {"min_support": 0.002, "target": "maximal"}),
            ],
        ),
        "parse_logs": (("total_s", "memory_bytes", "grouping_accuracy"), [("imports", {})]),
        "dedupe": (("total_s", "memory_bytes", "kept_share"), [("stdlib", {"threshold": 0.8})]),
        "sparse_code": (
            ("total_s", "memory_bytes", "free_energy"),
            [("bars:2000:mca", {}), ("bars:2000:bsc", {}), ("patches:5000", {"components": 64})],
        ),
        "curate": (
            ("total_s", "memory_bytes", "kept_share"),
            [("stdlib", {"keep": 0.7}), ("digits", {"keep": 0.7})],
        ),
    },
    "retrieve": {
        "index": (
            ("query_s", "build_s", "memory_bytes", "recall"),
            [
                ("photos:20000", {}),
                ("photos:200000", {}),
                ("photos:200000", {"recall": 0.99}),
            ],
        ),
        "recommend": (
            ("train_s", "request_s", "memory_bytes", "hr10"),
            [("streams:20000", {})],
        ),
    },
    "graph": {
        "embed_nodes": (
            ("embed_s", "memory_bytes", "micro_f1"),
            [("planted:2000", {}), ("packages", {})],
        ),
        "communities": (
            ("query_s", "build_s", "index_bytes", "label_share"),
            [("packages", {})],
        ),
        "train_gnn": (
            ("train_s", "memory_bytes", "test_accuracy"),
            [("planetoid/cora.npz", {})],
        ),
        "train_deep_gnn": (
            ("epoch_s", "sent_bytes", "test_accuracy"),
            [("planetoid/cora.npz", {})],
        ),
    },
}


def table_of(room: str) -> Path:
    """The file with the tables of a room."""
    return RESULTS.parent / room / "methods.json"


def measured(
    kind: str, data: str, settings: dict[str, Any], columns: tuple[str, ...], longest_s: float
) -> dict[str, Any]:
    """Each method's first plan, run."""
    plans = shoal.plan(kind=kind, data=data, **settings)
    rows: dict[str, dict[str, Any]] = {}
    for plan in plans:
        name = re.split(r"\W", kind_of(plan).describe(plan))[0]
        if name in rows:
            continue
        predicted = {key: one.value for key, one in plan.predicted.items()}
        rows[name] = {"predicted": predicted, "measured": {}}
        if predicted[columns[0]] > longest_s:
            continue
        with tempfile.TemporaryDirectory() as folder:
            saved, run = Path(folder, "plan.yaml"), Path(folder, "run")
            plan.save(saved)
            words = [sys.executable, "-m", "shoal", "run", kind, "-q", "--plan", str(saved)]
            subprocess.run([*words, "--dir", str(run)], check=True, stdout=subprocess.DEVNULL)
            found = json.loads((run / "report.json").read_text())["measured"]
        rows[name]["measured"] = {key: found[key] for key in columns if key in found}
        print(kind, data, name, predicted[columns[0]], rows[name]["measured"], flush=True)
    return {"data": data, "settings": settings, "columns": columns, "methods": rows}


def main() -> None:
    """Measure the kinds that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = [kind for kinds in CASES.values() for kind in kinds]
    parser.add_argument("kinds", nargs="*", help=f"among {', '.join(known)}; all if none is named")
    parser.add_argument("--busy", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    given = parser.parse_args()
    if unknown := set(given.kinds) - set(known):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    if not given.busy:
        require_quiet()
    for room, kinds in CASES.items():
        table, wanted = table_of(room), [kind for kind in kinds if kind in (given.kinds or kinds)]
        if not wanted:
            continue
        before = json.loads(table.read_text())["kinds"] if table.exists() else {}
        for kind in wanted:
            columns, cases = kinds[kind]
            before[kind] = [measured(kind, *case, columns, LONGEST_S[room]) for case in cases]
        if given.dry:
            print(json.dumps(before, indent=1))
        else:
            finish(table, {"kinds": before}, [], dry=False)


if __name__ == "__main__":
    main()
