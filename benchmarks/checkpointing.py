"""How long training waits for a checkpoint: our modes beside torch.distributed.checkpoint.

Usage: python benchmarks/checkpointing.py [stall|every|load]

One process trains 100 million parameters with AdamW (1.2 GB of state); all methods save the same
tensors to the same disk in one run, turn by turn.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Row, record

from shoal.checkpoint import SAVE_MODES
from shoal.checkpoint.peers import Alone
from shoal.checkpoint.store import Store
from shoal.core.measure import bootstrap
from shoal.model.config import ModelConfig
from shoal.train import zoo

SHAPE = ModelConfig(
    vocab_size=16_384,
    hidden=768,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    ffn_hidden=2048,
    max_position=512,
)
STEPS_BETWEEN = 10


class Trained:
    """A model, its optimizer and a batch of random tokens."""

    def __init__(self, tokens: int) -> None:
        torch.manual_seed(0)
        self.model = zoo.random(SHAPE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randint(0, SHAPE.vocab_size, (max(1, tokens // 256), min(tokens, 256)))
        self.before_update: Callable[[], Any] = lambda: None
        self.step()

    def step(self) -> float:
        """One step; the seconds that ``before_update`` took."""
        logits = self.model(self.batch)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.batch.flatten())
        loss.backward()
        begin = time.perf_counter()
        self.before_update()
        waited = time.perf_counter() - begin
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return waited

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that is saved."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{name}.{key}"] = value
        return found


class Ours:
    """A mode of ours."""

    def __init__(self, place: Path, mode: Any) -> None:
        self.store = Store(place, keep=1)
        self.saver = SAVE_MODES.build(mode).build(self.store, Alone())
        self.before_update = self.saver.before_update

    def save(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Begin."""
        self.ticket = self.saver.save(step, tensors, {})

    def drain(self) -> None:
        """Wait for what is under way."""
        self.ticket.wait()
        self.saver.finished()

    def close(self) -> None:
        """End."""
        self.saver.close()


class Dcp:
    """torch.distributed.checkpoint, which keeps the newest two as well."""

    def __init__(self, place: Path, *, asynchronous: bool) -> None:
        self.place, self.asynchronous = place, asynchronous
        self.future: Any = None
        self.saved: list[Path] = []
        self.before_update: Callable[[], Any] = lambda: None

    def save(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Begin."""
        import torch.distributed.checkpoint as dcp

        self.drain()
        path = self.place / str(step)
        self.saved.append(path)
        if self.asynchronous:
            self.future = dcp.async_save(tensors, checkpoint_id=path)
        else:
            dcp.save(tensors, checkpoint_id=path)
            # What save returns before is in the page cache; ours is on the disk.
        for old in self.saved[:-2]:
            shutil.rmtree(old)
        self.saved = self.saved[-2:]

    def drain(self) -> None:
        """Wait for what is under way."""
        if self.future is not None:
            self.future.result()
            self.future = None

    def close(self) -> None:
        """End."""
        self.drain()


@contextlib.contextmanager
def methods(names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Methods by name, each with a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="shoal-checkpointing-") as root:
        made: dict[str, Any] = {}
        for name, mode in names.items():
            place = Path(root) / name.replace(" ", "-")
            if name.startswith("dcp"):
                made[name] = Dcp(place, asynchronous="async" in name)
            else:
                made[name] = Ours(place, mode)
        try:
            yield made
        finally:
            for one in made.values():
                one.close()


def stall(rounds: int = 2) -> list[Row]:
    """Seconds for which one save holds training up, every 10 steps."""
    modes = [mode for mode in SAVE_MODES if mode != "blocking"]
    names = {"dcp.save": None, "dcp.async_save": None} | {m: m for m in modes}
    trained = Trained(tokens=32)
    size = sum(t.nbytes for t in trained.tensors().values())
    waited: dict[str, list[float]] = {name: [] for name in names}
    with methods(names) as made:
        for number in range(rounds + 1):
            for name in sorted(made, key=lambda n: hash((number, n))):
                method = made[name]
                trained.before_update = method.before_update
                begin = time.perf_counter()
                method.save(number + 1, trained.tensors())
                spent = time.perf_counter() - begin
                spent += sum(trained.step() for _ in range(STEPS_BETWEEN))
                method.drain()
                if number:  # the first one makes plans, pools and threads
                    waited[name].append(spent)
    for name, seconds in waited.items():
        print(
            f"{name:16s} {1e3 * statistics.median(seconds):8.1f} ms", [f"{s:.3f}" for s in seconds]
        )
    rows = []
    for mode in modes:
        for peer, threshold in (("dcp.save", 10.0), ("dcp.async_save", 3.0)):
            ratios = [a / b for a, b in zip(waited[peer], waited[mode], strict=True)]
            found = bootstrap(ratios)
            rows.append(
                Row(
                    name=f"checkpoint stall: {peer} over {mode}",
                    value=statistics.median(ratios),
                    unit="x",
                    comparison=">=",
                    threshold=threshold,
                    note=f"{size / 1e9:.2f} GB of state, saved every {STEPS_BETWEEN} steps, keep 2",
                    low=found.low,
                    high=found.high,
                    samples={peer: waited[peer], mode: waited[mode]},
                )
            )
    return rows


def every(rounds: int = 3, steps: int = 2) -> list[Row]:
    """Time of steps with a checkpoint after every one, over that of steps without."""
    names = {m: m for m in SAVE_MODES if m != "blocking"}
    trained = Trained(tokens=1024)
    spent: dict[str, list[float]] = {name: [] for name in ("none", *names)}
    with methods(names) as made:
        for number in range(rounds + 1):
            for name in spent:
                method = made.get(name)
                trained.before_update = method.before_update if method else (lambda: None)
                begin = time.perf_counter()
                for step in range(steps):
                    trained.step()
                    if method:
                        method.save(number * steps + step + 1, trained.tensors())
                seconds = time.perf_counter() - begin
                if method:
                    trained.before_update()
                    method.drain()
                if number:
                    spent[name].append(seconds / steps)
    for name, seconds in spent.items():
        print(f"{name:16s} {statistics.median(seconds):8.3f} s", [f"{s:.3f}" for s in seconds])
    rows = []
    for mode in names:
        ratios = [a / b for a, b in zip(spent[mode], spent["none"], strict=True)]
        found = bootstrap(ratios)
        rows.append(
            Row(
                name=f"a checkpoint every step: {mode} over none",
                value=statistics.median(ratios),
                unit="x",
                comparison="<=",
                threshold=1.1,
                note="1.2 GB of state, 1,024 tokens a step",
                low=found.low,
                high=found.high,
                samples={"none": spent["none"], mode: spent[mode]},
            )
        )
    return rows


PARTS: dict[str, Callable[[], list[Row]]] = {"stall": stall, "every": every}


def main() -> None:
    """Measure what is asked for, or all of it."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: list[Row] = []
    for name in [w for w in sys.argv[1:] if w in PARTS] or PARTS:
        rows += PARTS[name]()
        gc.collect()
    dist.destroy_process_group()
    for row in rows:
        print(f"{row.name}: {row.value:.2f} {row.unit} ({'holds' if row.holds else 'misses'})")
    if "--dry" not in sys.argv:
        record(rows)


if __name__ == "__main__":
    main()
