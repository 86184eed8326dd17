"""The demo's numbers: how long it takes, what it learns, how good the prediction was.

Usage: python benchmarks/demo.py [--minutes 3] [--clone]

``--clone`` times ``make demo`` on a clean clone, installation included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Row, record, require_quiet

ROOT = Path(__file__).parents[1]


def measured(report: Path) -> tuple[dict[str, float], dict[str, float]]:
    """(measured, errors) of a report."""
    data = json.loads(report.read_text())
    return data["measured"], data["errors"]


def rows(folder: Path, minutes: float, wall_s: float, clone: bool) -> list[Row]:
    """What must hold after so many minutes of training."""
    result, errors = measured(folder / "run" / "report.json")
    with (folder / "run" / "events.jsonl").open() as events:
        first = json.loads(events.readline())["time"]
    before = (folder / "run" / "plan.yaml").stat().st_mtime <= first
    text = (
        f"{result['total_s']:.0f} s in steps, {result['steps']:.0f} steps, "
        f"{result['tokens_per_s']:,.0f} tokens/s on 2 ranks of one thread; one rank killed and "
        f"resumed, {result['lost_s']:.0f} s lost"
    )
    name, threshold, baseline = (
        ("gzip -9", 0.95, "gzip_bits_per_byte")
        if minutes < 10
        else ("xz -9e", 0.85, "xz_bits_per_byte")
    )
    made = [
        Row(
            name=f"bits per byte after {minutes:g} minutes against {name}",
            value=result["bits_per_byte"] / result[baseline],
            unit="x",
            comparison="<=",
            threshold=threshold,
            note=f"held-out files, context reset per file: {result['bits_per_byte']:.4f} against "
            f"{result[baseline]:.4f}; {text}",
        ),
        Row(
            name=f"error of the plan's step time, {minutes:g} minutes",
            value=abs(errors["step_s"]),
            unit="",
            comparison="<=",
            threshold=0.25,
            note=f"measured / predicted - 1 = {errors['step_s']:+.3f}; median step "
            f"{1e3 * result['step_s']:.0f} ms; plan written {'before' if before else 'AFTER'} it",
        ),
    ]
    if clone:
        made.append(
            Row(
                name="make demo from a clean clone",
                value=wall_s / 60,
                unit="min",
                comparison="<=",
                threshold=10,
                note="virtual environment, installation, probe, plan, training, lost rank, resume, "
                "export, text, report",
            )
        )
    return made


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--clone", action="store_true")
    options = parser.parse_args()
    require_quiet()
    folder = Path(tempfile.mkdtemp(prefix="shoal-demo-"))
    environment = {**os.environ, "SHOAL_HOME": str(folder / "home")}
    begin = time.monotonic()
    try:
        if options.clone:
            subprocess.run(["git", "clone", "-q", ROOT, folder / "clone"], check=True)
            command = ["make", "demo", f"MINUTES={options.minutes:g}"]
            subprocess.run(command, cwd=folder / "clone", env=environment, check=True)
            out = folder / "clone" / "demo"
        else:
            out = folder / "demo"
            command = [sys.executable, "-m", "shoal", "demo", "--dir", str(out)]
            command += ["--minutes", f"{options.minutes:g}"]
            subprocess.run(command, env=environment, check=True)
        record(rows(out, options.minutes, time.monotonic() - begin, options.clone))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
