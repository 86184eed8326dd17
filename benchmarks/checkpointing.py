"""How long training waits for a checkpoint: our modes beside torch.distributed.checkpoint.

Usage: python benchmarks/checkpointing.py [stall] [every] [--quick] [--dry]

One process trains 110 million parameters with AdamW (1.3 GB of state); all methods save the same
tensors to the same disk in one run, turn by turn, and what a turn has saved is removed after it.
``stall`` takes three minutes, ``every`` four; ``--quick`` makes one round of each and records
nothing, and so does ``--dry``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from common import RESULTS, Row, finish, require_quiet

from shoal.checkpoint import SAVE_MODES
from shoal.checkpoint.peers import SinglePeer
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
TABLE = RESULTS.parent / "checkpoints" / "modes.json"
STEPS_BETWEEN = 10
# A short step gives the copy little to hide behind; a long one is what a save at every step needs.
STALL_TOKENS, EVERY_TOKENS = 32, 2048
# Rounds of ways whose steps are told and not judged.
TOLD_ROUNDS = 2
MODES = tuple(SAVE_MODES)
PEERS = ("dcp.save", "dcp.async_save")


class Trained:
    """A model, its optimizer and a batch of random tokens.

    Args:
        tokens: of a step.
        shape: of the model.
        device: where it is trained.
    """

    def __init__(self, tokens: int, shape: ModelConfig = SHAPE, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.model = zoo.random(shape).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        size = (max(1, tokens // 256), min(tokens, 256))
        self.batch = torch.randint(0, shape.vocab_size, size).to(device)
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
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors


class Method(Protocol):
    """A way of saving, at work."""

    before_update: Callable[[], Any]

    def save(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Begin."""

    def drain(self) -> None:
        """Wait for what is under way."""

    def close(self) -> None:
        """End."""


class Nothing:
    """Saves nothing."""

    def __init__(self) -> None:
        self.before_update: Callable[[], Any] = lambda: None

    def save(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Nothing."""

    def drain(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Ours:
    """A mode of ours, which keeps the newest checkpoint.

    Args:
        place: where.
        mode: its name.
        device: where the tensors are.
    """

    def __init__(self, place: Path, mode: str, device: str) -> None:
        self.place = place
        part = SAVE_MODES.build(mode)
        self.saver = part.build(Store(place, keep=1), SinglePeer(), device=device)
        self.before_update: Callable[[], Any] = self.saver.before_update
        self.ticket: Any = None

    def save(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """See :class:`Method`."""
        self.ticket = self.saver.save(step, tensors, {})

    def drain(self) -> None:
        """See :class:`Method`."""
        self.ticket.wait()
        self.saver.finished()
        clear(self.place)

    def close(self) -> None:
        """See :class:`Method`."""
        self.saver.close()


class Dcp:
    """torch.distributed.checkpoint, which keeps the newest checkpoint as well.

    Args:
        place: where.
        asynchronous: whether it is ``async_save``.
    """

    def __init__(self, place: Path, *, asynchronous: bool) -> None:
        self.place, self.asynchronous = place, asynchronous
        self.future: Any = None
        self.before_update: Callable[[], Any] = lambda: None

    def save(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """See :class:`Method`; it flushes its files, as we do."""
        import torch.distributed.checkpoint as dcp

        self._wait()
        clear(self.place, but=str(step - 1))
        path = self.place / str(step)
        if self.asynchronous:
            self.future = dcp.async_save(tensors, checkpoint_id=path)
        else:
            dcp.save(tensors, checkpoint_id=path)

    def _wait(self) -> None:
        if self.future is not None:
            self.future.result()
            self.future = None

    def drain(self) -> None:
        """See :class:`Method`."""
        self._wait()
        clear(self.place)

    def close(self) -> None:
        """See :class:`Method`."""
        self._wait()


def clear(place: Path, but: str = "") -> None:
    """Give the disk back."""
    for path in place.iterdir() if place.exists() else ():
        if path.name != but:
            shutil.rmtree(path)


@contextlib.contextmanager
def methods(*names: str, device: str = "cpu") -> Iterator[dict[str, Method]]:
    """Methods by name, each with a directory of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-checkpointing-") as root,
        contextlib.ExitStack() as undo,
    ):
        made: dict[str, Method] = {}
        for name in names:
            place = Path(root) / name
            one: Method = Nothing()
            if name in PEERS:
                one = Dcp(place, asynchronous="async" in name)
            elif name in MODES:
                one = Ours(place, name, device)
            undo.callback(one.close)
            made[name] = one
        yield made


def stall(rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """Seconds for which a save holds training up, and by which it makes ten steps longer."""
    names = (*PEERS, *MODES)
    trained = Trained(STALL_TOKENS)
    size = sum(t.nbytes for t in trained.tensors().values())
    waited: dict[str, list[float]] = {name: [] for name in names}
    lost: dict[str, list[float]] = {name: [] for name in names}
    with methods("none", *names) as made:
        for number in range(rounds + 1):
            spent: dict[str, float] = {}
            # The first round makes plans, memory and threads.
            steps = STEPS_BETWEEN if number else 1
            for name, method in made.items() if number % 2 else reversed(made.items()):
                trained.before_update = method.before_update
                begin = time.perf_counter()
                method.save(number + 1, trained.tensors())
                held = time.perf_counter() - begin
                held += sum(trained.step() for _ in range(steps))
                spent[name] = time.perf_counter() - begin
                method.drain()
                if number and name in waited:
                    waited[name].append(held)
            if number:
                for name in names:
                    lost[name].append(spent[name] - spent["none"])
    for name in names:
        print(f"{name:16s} waits {told(waited[name])}  loses {told(lost[name])}", flush=True)
    rows = []
    for mode in MODES:
        for peer, threshold in (("dcp.save", 10.0), ("dcp.async_save", 3.0)):
            if mode == "blocking":
                continue
            ratios = [a / b for a, b in zip(waited[peer], waited[mode], strict=True)]
            note = f"{size / 1e9:.2f} GB of state, saved every {STEPS_BETWEEN} steps"
            samples = {peer: waited[peer], mode: waited[mode]}
            name = f"checkpoint stall: {peer} over {mode}"
            rows.append(row(name, ratios, ">=", threshold, note, samples))
    table = {
        name: {"stall_s": statistics.median(waited[name]), "lost_s": statistics.median(lost[name])}
        for name in names
    }
    return rows, {"state_bytes": size, "steps_between": STEPS_BETWEEN, "methods": table}


def every(rounds: int, steps: int = 2) -> tuple[list[Row], dict[str, Any]]:
    """Time of steps with a checkpoint after every one, over that of steps without."""
    trained = Trained(EVERY_TOKENS)
    judged = ("none", "snapshot", "lazy")
    names = (*judged, "blocking", "dcp.async_save")
    spent: dict[str, list[float]] = {name: [] for name in names}
    with methods(*names) as made:
        for number in range(rounds + 1):
            for name, method in made.items() if number % 2 else reversed(made.items()):
                if name not in judged and number > TOLD_ROUNDS:
                    continue
                trained.before_update = method.before_update
                # From one save under way to another, as in the middle of a run.
                for step in range(steps + 1 if number else 1):
                    if step == 1:
                        begin = time.perf_counter()
                    trained.step()
                    method.save(step + 1, trained.tensors())
                if number:
                    spent[name].append((time.perf_counter() - begin) / steps)
                method.before_update()
                method.drain()
    for name, seconds in spent.items():
        print(f"{name:16s} {told(seconds)}", flush=True)
    rows, table = [], {}
    for name in names[1:]:
        ratios = [a / b for a, b in zip(spent[name], spent["none"], strict=False)]
        table[name] = {"every_step_x": statistics.median(ratios)}
        if name in judged:
            note = f"1.3 GB of state, {EVERY_TOKENS:,} tokens a step"
            samples = {"none": spent["none"], name: spent[name]}
            what = f"a checkpoint every step: {name} over none"
            rows.append(row(what, ratios, "<=", 1.1, note, samples))
    step_s = statistics.median(spent["none"])
    return rows, {"tokens": EVERY_TOKENS, "step_s": step_s, "methods": table}


def told(seconds: list[float]) -> str:
    """A median and what it is of."""
    return f"{statistics.median(seconds):.3f} s [{', '.join(f'{s:.3f}' for s in seconds)}]"


def row(
    name: str,
    ratios: list[float],
    comparison: str,
    threshold: float,
    note: str,
    samples: dict[str, list[float]],
) -> Row:
    """A median of paired ratios."""
    result = bootstrap(ratios)
    return Row(
        name=name,
        value=statistics.median(ratios),
        unit="x",
        comparison=comparison,
        threshold=threshold,
        note=note,
        low=result.low,
        high=result.high,
        samples=samples,
    )


PARTS = {"stall": stall, "every": every}


def main() -> None:
    """Measure what is asked for, or all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if not (given.quick or given.dry):
        require_quiet()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: list[Row] = []
    table: dict[str, Any] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for name in given.parts or PARTS:
        result, part = PARTS[name](1 if given.quick else given.rounds)
        rows += result
        table[name] = part
        gc.collect()
    dist.destroy_process_group()
    finish(TABLE, table, rows, dry=given.quick or given.dry)


if __name__ == "__main__":
    main()
