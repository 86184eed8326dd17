"""How long the tests and CI take, on a clean clone.

Usage: python benchmarks/suite.py
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from common import Row, record

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run CI on a clone and record its times."""
    with tempfile.TemporaryDirectory(prefix="shoal-ci-") as place:
        clone = Path(place) / "clone"
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        environment = {**os.environ, "SHOAL_HOME": str(Path(place) / "home"), "CI": "true"}
        begin = time.monotonic()
        done = subprocess.run(
            ["bash", ".ci/run"],
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        whole = time.monotonic() - begin
        print(done.stdout[-3000:], done.stderr[-3000:])
        done.check_returncode()
    steps = dict(re.findall(r"^(.+) took (\d+) s$", done.stdout, flags=re.MULTILINE))
    text = ", ".join(f"{name} {seconds} s" for name, seconds in steps.items())
    record(
        [
            Row(
                name="make test",
                value=int(steps["make test"]) / 60,
                unit="min",
                comparison="<=",
                threshold=4,
                note="the quick tests, in CI",
            ),
            Row(
                name=".ci/run on a clean clone",
                value=whole / 60,
                unit="min",
                comparison="<=",
                threshold=20,
                note=text,
            ),
        ]
    )


if __name__ == "__main__":
    main()
