"""How long a checkpoint takes to load, beside reading as many bytes of the same disk raw.

Usage: python benchmarks/loading.py [--gb N] [--rounds N] [--dry]

One process loads the weights and the optimizer state of a model into tensors that are there
already, every piece verified, in turn with a plain read of the same file in one thread, in blocks
of the size that this disk is fastest with. Both pass the page cache by. "Piece by piece" is what
loading was before: memory-mapped, one tensor after the other, from a page cache that is emptied
first. The table is ``results/checkpoints/loading.json``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Row, record, require_quiet

from shoal.checkpoint.loading import LoadReport, load_pieces
from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.saved_checkpoint import SavedCheckpoint
from shoal.checkpoint.store import Store
from shoal.core.files import write_json
from shoal.core.measure import bootstrap
from shoal.machine.fingerprint import fingerprint, versions

TABLE = RESULTS.parent / "checkpoints" / "loading.json"
# Blocks of the plain read; the fastest is taken, so that ours is not compared with a slow one.
_BLOCKS = (2**20, 2**22, 2**23)
_LIMIT = 1.3


def state(nbytes: int) -> dict[str, torch.Tensor]:
    """Layers of a transformer with the moments of AdamW, in fp32, of about so many bytes."""
    hidden, state = 1536, {}
    noise = torch.randn(2**22, generator=torch.Generator().manual_seed(0))
    shapes = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden), "norm": (hidden,)}
    shapes |= {"up": (4 * hidden, hidden), "down": (hidden, 4 * hidden)}
    total, layer = 0, 0
    while total < nbytes:
        for name, shape in shapes.items():
            for prefix, suffix in (("model", ""), ("optimizer", ".m"), ("optimizer", ".v")):
                tensor = torch.empty(shape)
                flat = tensor.view(-1)
                for at in range(0, flat.numel(), len(noise)):
                    part = flat[at : at + len(noise)]
                    part.copy_(noise[: len(part)])
                tensor += layer
                state[f"{prefix}.layers.{layer}.{name}{suffix}"] = tensor
                total += tensor.nbytes
        layer += 1
    return state


def raw(path: Path, block: int) -> None:
    """Read a file past the page cache."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        size, at = os.fstat(fd).st_size, 0
        with mmap.mmap(-1, block) as memory:
            while at < size:
                at += os.preadv(fd, [memory], at)
    finally:
        os.close(fd)


def forget(folder: Path) -> None:
    """Drop what the page cache has of a directory's files."""
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def measure(nbytes: int, rounds: int) -> tuple[Row, dict[str, Any]]:
    """Load and read in turn; the row that is judged, and everything that was seen."""
    place = Path(tempfile.mkdtemp(prefix="loading-"))
    try:
        given = state(nbytes)
        Store(place).save(1, given, {})
        folder = Store(place).folder(1)
        file = folder / "rank-00000.safetensors"
        targets = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
        wanted = {name: [Piece.whole(tensor)] for name, tensor in targets.items()}
        reports: list[LoadReport] = []

        def load() -> None:
            reports.append(load_pieces(Store(place).open(1, verify=False), wanted))

        def piece_by_piece() -> None:
            saved = SavedCheckpoint(folder)
            for name, tensor in targets.items():
                saved.read_into(name, tensor)

        blocks = {
            block: min(_timed(lambda b=block: raw(file, b))[0] for _ in range(2))
            for block in _BLOCKS
        }
        block = min(blocks, key=lambda b: blocks[b])
        methods = {"load": load, "raw": lambda: raw(file, block), "piece by piece": piece_by_piece}
        spent: dict[str, list[float]] = {name: [] for name in methods}
        for number in range(rounds + 1):
            # Forth and back, so that a disk that tires is fair to all.
            for name in list(methods) if number % 2 else reversed(list(methods)):
                forget(folder)
                seconds, _ = _timed(methods[name])
                if number:
                    spent[name].append(seconds)
        equal = all(torch.equal(targets[name], tensor) for name, tensor in given.items())
        if not equal:
            raise SystemExit("what was loaded is not what was saved")
        size = file.stat().st_size
    finally:
        shutil.rmtree(place)
    ratios = [a / b for a, b in zip(spent["load"], spent["raw"], strict=True)]
    result = bootstrap(ratios)
    row = Row(
        name="load of a state over the raw read of its bytes",
        value=statistics.median(ratios),
        unit="x",
        comparison="<=",
        threshold=_LIMIT,
        note=f"{size / 1e9:.2f} GB, one rank, verified, into tensors that are there; O_DIRECT, "
        f"raw read in blocks of {block >> 20} MiB",
        low=result.low,
        high=result.high,
        samples=spent,
    )
    table = {
        "bytes": size,
        "raw_block_bytes": block,
        "raw_block_s": {str(b): s for b, s in blocks.items()},
        "seconds": spent,
        "gb_per_s": {n: size / statistics.median(s) / 1e9 for n, s in spent.items()},
        "load_over_raw": {"value": row.value, "low": result.low, "high": result.high},
        "threshold": _LIMIT,
        "holds": row.holds,
        "reports": [asdict(report) for report in reports[1:]],
    }
    return row, table


def main() -> None:
    """Measure, and write the table."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--gb", type=float, default=2.0)
    words.add_argument("--rounds", type=int, default=7)
    words.add_argument("--dry", action="store_true", help="Write nothing.")
    args = words.parse_args()
    if not args.dry:
        require_quiet()
    row, table = measure(int(args.gb * 1e9), args.rounds)
    for name, seconds in table["seconds"].items():
        print(f"{name:16s} {statistics.median(seconds):7.3f} s", [f"{s:.3f}" for s in seconds])
    print(json.dumps(table["reports"][-1]))
    print(f"{row.name}: {row.value:.2f} [{row.low:.2f}, {row.high:.2f}]")
    if args.dry:
        return
    record([row])
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    head = {"machine": fingerprint(), "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    write_json(TABLE, {**head, "commit": commit, **table})


if __name__ == "__main__":
    main()
