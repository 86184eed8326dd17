#!/usr/bin/env python3
"""Break training runs and servers at random for a while, and look for anything that is wrong.

    python benchmarks/soak.py --minutes 120              write results/soak.json
    python benchmarks/soak.py --minutes 5 --seed 7       the same faults again, in the same order
    python benchmarks/soak.py --minutes 5 --only OnRay   trials of one kind

A training trial starts a run of two ranks and lets faults strike it one after the other; after
each, ``--resume`` goes on. In the end its weights must be those of a run that nothing struck, bit
for bit. A serving trial asks a server the same greedy questions from six clients while a fault
strikes it; every answer must be the one of a quiet server, or a clear error. A trial on Ray is
one of both on three nodes of a cluster, each with one processor: a node that works is killed.

After each fault: no process, no file for temporary use and no shared memory is left, no command
ended with a trace, every checkpoint that is listed verifies. Full disks need root; without it they
are left out, and the result says so. What jumps is the wall clock as Python reads it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from soak_command import WrongError
from soak_ray import OnRay
from soak_serving import NODE, Serving
from soak_training import Training

from shoal.core.files import write_json
from shoal.machine.fingerprint import fingerprint


def main() -> int:
    """Trials until the time is over; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("Training", "Serving", "OnRay"))
    parser.add_argument("--out", type=Path, default=Path("results/soak.json"))
    given = parser.parse_args()
    # Shells ignore Ctrl-C for what they start behind them; a command would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tally: Counter[str] = Counter()
    wrong: list[str] = []
    left_out: list[str] = []
    machine = fingerprint()
    trials = 0
    began = time.monotonic()

    def write() -> dict[str, Any]:
        """All so far, in case this program is ended too."""
        result = {
            "date": datetime.date.today().isoformat(),
            "machine": machine,
            "seed": given.seed,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "trials": trials,
            "faults_left_out": left_out,
            "counts": dict(sorted(tally.items())),
            "wrong": wrong,
        }
        write_json(given.out, result)
        return result

    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        draw = random.Random(given.seed)
        folder = Path(name)
        training = Training(folder, draw, tally)
        serving = Serving(folder / "whole" / "export", folder, draw, tally)
        kinds: list[Training | Serving | OnRay] = [training, serving]
        if importlib.util.find_spec("ray"):
            kinds.append(OnRay(training, serving))
        if given.only:
            kinds = [kind for kind in kinds if type(kind).__name__ == given.only]
        left_out += sorted({"disk full"} - set(training.faults))
        left_out += [NODE] * (not any(isinstance(kind, OnRay) for kind in kinds))
        while time.monotonic() - began < 60 * given.minutes:
            (kind,) = draw.choices(kinds, [1.0 if isinstance(k, OnRay) else 3.0 for k in kinds])
            try:
                line = kind.trial(trials)
            except WrongError as cause:
                line = f"WRONG: {cause}"
                wrong.append(str(cause))
            trials += 1
            print(f"{(time.monotonic() - began) / 60:6.1f} min  {line}", flush=True)
            write()
    print(json.dumps({k: v for k, v in write().items() if k != "machine"}, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
