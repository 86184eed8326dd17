"""Collectives and messages of CPU ranks: shared memory against Gloo, two ranks of one thread.

Usage: python benchmarks/collectives.py [--rounds N]

Both take turns in the same two processes. Beside the ratio stands the physical limit: an
all-reduce in which each rank reads its part once and writes the sum once, by a plain
copy of as many bytes, measured in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import Row, record, require_quiet

from shoal.core.measure import bootstrap
from shoal.core.meter import Meter
from shoal.parallel.comm.collectives import TorchComm

SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "16 MiB": 2**24, "64 MiB": 2**26}
MESSAGES = {"4 KiB": 2**12, "128 KiB": 2**17, "1 MiB": 2**20}


def rank_main(out: Path, rounds: int) -> None:
    """What each rank runs; rank 0 writes the seconds of one call, by method and size."""
    torch.set_num_threads(1)
    with Meter([]) as meter:
        shared = TorchComm.from_environment(meter, rendezvous=f"file://{out}/meet")
        if shared.shared is None:
            raise SystemExit("this host has no shared memory for ranks; see parallel.shared_memory")
        gloo = TorchComm.from_environment(meter, shared_memory=False)
        seconds: dict[str, list[float]] = {}
        for label, size in SIZES.items():
            data, other = torch.zeros(size // 4), torch.zeros(size // 4)
            time_in_turn(
                shared,
                {
                    f"shared {label}": lambda x=data: shared.all_reduce(x, tag="x").wait(),
                    f"gloo {label}": lambda x=data: gloo.all_reduce(x, tag="x").wait(),
                    f"copy {label}": lambda x=data, to=other: to.copy_(x),
                },
                rounds,
                max(2, min(200, 2**25 // size)),
                seconds,
            )
        for label, size in MESSAGES.items():
            data, other = torch.zeros(size // 4), torch.zeros(size // 4)
            time_in_turn(
                shared,
                {
                    f"message shared {label}": lambda x=data: there_and_back(shared, x),
                    f"message gloo {label}": lambda x=data: there_and_back(gloo, x),
                    f"message copy {label}": lambda x=data, to=other: to.copy_(x),
                },
                rounds,
                max(2, min(200, 2**25 // size)),
                seconds,
            )
        if shared.rank == 0:
            (out / "seconds.json").write_text(json.dumps(seconds))
        shared.barrier()
        shared.close()


def there_and_back(comm: TorchComm, x: torch.Tensor) -> None:
    """A message from rank 0 to rank 1 and back."""
    other = 1 - comm.rank
    for sender in (0, 1):
        if comm.rank == sender:
            comm.send(x, other, tag="x").wait()
        else:
            comm.receive(x, other, tag="x").wait()


def time_in_turn(
    comm: TorchComm,
    calls: dict[str, Callable[[], object]],
    rounds: int,
    batch: int,
    seconds: dict[str, list[float]],
) -> None:
    """Add to ``seconds`` those of one call, by name and round; calls take turns."""
    names = list(calls)
    for number in range(rounds + 1):
        for name in names[number % 3 :] + names[: number % 3]:
            comm.barrier()
            begin = time.perf_counter()
            for _ in range(batch):
                calls[name]()
            taken = (time.perf_counter() - begin) / batch
            if number:  # the first round warms up
                seconds.setdefault(name, []).append(taken)


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_in is not None:
        rank_main(options.rank_in, options.rounds)
        return
    require_quiet()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--rank-in", folder, "--rounds", str(options.rounds)]
        common = {**os.environ, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments], env={**common, "RANK": str(rank)}
            )
            for rank in range(2)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("a rank failed")
        seconds = json.loads((Path(folder) / "seconds.json").read_text())
    rows = []
    for label in SIZES:
        mine, peer = seconds[f"shared {label}"], seconds[f"gloo {label}"]
        ratio = bootstrap(np.divide(peer, mine))
        limit = statistics.median(np.divide(seconds[f"copy {label}"], mine))
        rows.append(
            Row(
                name=f"all-reduce of {label}: shared memory against Gloo",
                value=ratio.value,
                low=ratio.low,
                high=ratio.high,
                unit="x",
                comparison=">=",
                threshold=1.0,
                note=f"2 ranks of one thread, fp32; shared {1e6 * statistics.median(mine):.0f} us, "
                f"Gloo {1e6 * statistics.median(peer):.0f} us; a plain copy of as many bytes takes "
                f"{limit:.2f} of the shared one's time; {options.rounds} rounds in turn",
                samples={"shared_s": mine, "gloo_s": peer},
            )
        )
    for label in MESSAGES:
        # One way is half of there and back, and takes a copy in and a copy out.
        mine, peer, copy = (
            np.divide(seconds[f"message {how} {label}"], per)
            for how, per in (("shared", 2), ("gloo", 2), ("copy", 0.5))
        )
        ratio = bootstrap(peer / mine)
        rows.append(
            Row(
                name=f"message of {label}: shared memory against Gloo",
                value=ratio.value,
                low=ratio.low,
                high=ratio.high,
                unit="x",
                comparison=">=",
                threshold=1.0,
                note=f"2 ranks of one thread, one way; shared {1e6 * np.median(mine):.0f} us, Gloo "
                f"{1e6 * np.median(peer):.0f} us; two plain copies of as many bytes take "
                f"{np.median(copy / mine):.2f} of the shared one's time; {options.rounds} rounds "
                "in turn",
                samples={"shared_s": mine.tolist(), "gloo_s": peer.tolist()},
            )
        )
    record(rows)


if __name__ == "__main__":
    main()
