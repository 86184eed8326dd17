"""What a second fine-tuning job on a host takes in memory, with a base of its own and a shared one.

Usage: python benchmarks/shared_base.py [--width N] [--layers N]

Runs of ``shoal train`` tune one model directory at the same time, with seeds of their own. Memory
is what the kernel says of the processes that train: what is a process's own alone (private), and
what it has with what it shares divided by who shares it (PSS).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from common import Row, record

from shoal.core.files import write_yaml
from shoal.core.meter import read_events
from shoal.model import huggingface
from shoal.model.config import ModelConfig
from shoal.train.peft.shared import image_of
from shoal.train.zoo import random

_WAIT_S = 120
_MIB = 2**20


@contextlib.contextmanager
def job(folder: Path, base: Path, how: str, seed: int) -> Iterator[psutil.Process]:
    """The process that trains, from its third step on; it is asked to stop at the end."""
    name = f"{how}-{seed}"
    config = {
        "name": name,
        "model": str(base),
        "base": how,
        "seed": seed,
        "finetune": {"name": "lora", "r": 8},
        "precision": "fp32",
        "seq_len": 64,
        "global_batch": 2,
        "steps": 10_000,
        "threads": 1,
        "evaluation": {"every": 0, "final": False},
        "checkpoint": {"every": 0},
    }
    write_yaml(folder / f"{name}.yaml", config)
    run = folder / name
    command = [sys.executable, "-m", "shoal", "train", str(folder / f"{name}.yaml")]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([*command, "--dir", str(run), "--quiet"], stdout=log, stderr=log)
    try:
        end = time.monotonic() + _WAIT_S
        while not _steps(run) >= 3:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit((folder / f"{name}.log").read_text()[-2000:])
            time.sleep(0.1)
        below = psutil.Process(process.pid).children(recursive=True)
        yield max(below or [psutil.Process(process.pid)], key=lambda one: one.memory_info().rss)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(_WAIT_S)


def _steps(run: Path) -> int:
    if not (run / "events.jsonl").exists():
        return 0
    return sum(event["kind"] == "step" for event in read_events(run / "events.jsonl"))


def memory(process: psutil.Process) -> dict[str, float]:
    """MiB of a process: its own alone, and its share."""
    result = process.memory_full_info()
    return {"private": result.uss / _MIB, "pss": result.pss / _MIB}


def main() -> None:
    """Measure one job and two, both ways, and record what the second adds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    width = options.width
    config = ModelConfig(
        vocab_size=2048,
        hidden=width,
        num_layers=options.layers,
        num_heads=width // 64,
        num_kv_heads=width // 64,
        head_dim=64,
        ffn_hidden=3 * width,
        max_position=64,
    )
    fields: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="shoal-base-") as place:
        folder = Path(place)
        base = folder / "model"
        huggingface.write(base, random(config))
        image = image_of(base)
        size = image.stat().st_size / _MIB
        for how in ("own", "shared"):
            with job(folder, base, how, 1) as first:
                alone = memory(first)
                with job(folder, base, how, 2) as second:
                    both = [memory(first), memory(second)]
            fields[how] = {
                "one": alone["pss"],
                "two": both[0]["pss"] + both[1]["pss"],
                "second": both[1]["private"],
            }
            fields[how]["added"] = fields[how]["two"] - fields[how]["one"]
        shutil.rmtree(image.parent)
    print(f"base in fp32: {size:.0f} MiB")
    print(json.dumps(fields, indent=2))
    saved = (fields["own"]["added"] - fields["shared"]["added"]) / size
    record(
        [
            Row(
                name="a second fine-tuning job on a shared base: memory that it does not need",
                value=saved,
                unit="x",
                comparison=">=",
                threshold=0.9,
                note=(
                    f"share of a base of {size:.0f} MiB in fp32 by which the two jobs' PSS grows "
                    f"less with a second; it adds {fields['shared']['added']:.0f} MiB, and "
                    f"{fields['own']['added']:.0f} MiB with a base of its own"
                ),
            )
        ]
    )


if __name__ == "__main__":
    main()
