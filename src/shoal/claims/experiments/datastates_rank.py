"""What the process of claim [36] DataStates-LLM does: train, and save after every step."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from shoal.checkpoint import SAVE_MODES
from shoal.checkpoint.peers import SinglePeer
from shoal.checkpoint.store import MODEL, OPTIMIZER, Store
from shoal.core.errors import CheckpointError
from shoal.memory.tiers.mover import EmulatedLink

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from shoal.checkpoint.protocols import Saver, SaveTicket
    from shoal.checkpoint.storage import Draft, FileSink
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import Comm


class SlowSink:
    """A file on a disk of a given rate."""

    def __init__(self, sink: FileSink, link: EmulatedLink) -> None:
        self._sink, self._link = sink, link
        self.finish, self.abandon = sink.finish, sink.abandon

    def write(self, at: int, data: np.ndarray) -> None:
        """See :class:`~shoal.checkpoint.storage.FileSink`."""
        through = self._link.book(data.nbytes)
        self._sink.write(at, data)
        time.sleep(max(0.0, through - time.perf_counter()))


def slow_store(place: Path, link: EmulatedLink) -> Store:
    """A store of the newest checkpoint, on a disk of a given rate."""
    store = Store(place, keep=1)
    make = store.storage.draft

    def draft(step: int, attempt: str = "") -> Draft:
        result = make(step, attempt)
        create = result.create
        result.create = lambda name, size: SlowSink(create(name, size), link)  # type: ignore[method-assign]
        return result

    store.storage.draft = draft  # type: ignore[method-assign]
    return store


class SlowFile(io.RawIOBase):
    """A file for ``torch.save`` on a disk of a given rate."""

    def __init__(self, path: Path, link: EmulatedLink) -> None:
        self._file = path.open("wb")
        self._link = link

    def write(self, data: Any) -> int:
        """Write, no faster than the disk."""
        through = self._link.book(len(data))
        done = self._file.write(data)
        time.sleep(max(0.0, through - time.perf_counter()))
        return done

    def writable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """The waits were the disk's; flushing would count it twice."""
        if not self.closed:
            self._file.close()
        super().close()


class TorchSave:
    """Saves with ``torch.save`` while training waits; the newest file replaces the old one."""

    def __init__(self, place: Path, link: EmulatedLink) -> None:
        self._place, self._link = place, link
        place.mkdir(parents=True)

    def save(self, step: int, held: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Return when it is on the disk."""
        with closing(SlowFile(self._place / "new", self._link)) as file:
            torch.save({**held, "step": step, **meta}, cast("IO[bytes]", file))
        os.replace(self._place / "new", self._place / "newest")

    def before_update(self) -> None:
        """Nothing is under way."""

    close = before_update


@dataclass
class DataStatesTraining:
    """A model, its optimizer, and a batch of random tokens."""

    config: ModelConfig
    tokens: int

    def __post_init__(self) -> None:
        from shoal.train import zoo

        model = self.config
        torch.manual_seed(0)
        self.model = zoo.random(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        length = min(self.tokens, model.max_position)
        self.batch = torch.randint(0, model.vocab_size, (self.tokens // length, length))
        self.step(lambda: None)

    def step(self, before_update: Callable[[], Any]) -> float:
        """One step; seconds for which ``before_update`` held it up."""
        logits = self.model(self.batch)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.batch.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        begin = time.perf_counter()
        before_update()
        waited = time.perf_counter() - begin
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return waited

    def held(self) -> dict[str, Tensor]:
        """All that a checkpoint holds; what an update changes together lies together."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            tensors[MODEL + name] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{OPTIMIZER}{name}.{key}"] = value
        return tensors


def time_modes(
    comm: Comm,
    *,
    config: ModelConfig,
    tokens: int,
    root: str,
    rounds: int,
    steps: int,
    bytes_per_s: float,
    modes: list[str],
) -> dict[str, Any]:
    """Seconds of steps that are saved, and for which saving held them up, mode by mode in turns.

    The first step of a turn does not count. Returns mode -> ``step`` and ``blocked`` seconds of
    every step; ``peer``, for which ``async_save`` of torch.distributed.checkpoint holds training
    up, without a slow disk.
    """
    run = DataStatesTraining(config, tokens)
    times: dict[str, Any] = {mode: {"step": [], "blocked": []} for mode in modes}
    number = 0
    for turn in range(rounds):
        for mode in modes[:: -1 if turn % 2 else 1]:
            place = Path(root) / f"{mode}-{turn}"
            link = EmulatedLink(bytes_per_s)
            saver: Any = TorchSave(place, link) if mode == "torch.save" else None
            if saver is None:
                saver = SAVE_MODES.build(mode).build(slow_store(place, link), SinglePeer())
            with closing(saver):
                for step in range(steps + 1):
                    number += 1
                    begin = time.perf_counter()
                    saver.save(number, run.held(), {})
                    blocked = time.perf_counter() - begin
                    blocked += run.step(saver.before_update)
                    if step:  # the first makes memory and threads
                        times[mode]["blocked"].append(blocked)
                        times[mode]["step"].append(time.perf_counter() - begin)
            shutil.rmtree(place)
    times["peer"] = _peer(run, Path(root))
    return times


def _peer(run: DataStatesTraining, root: Path) -> list[float]:
    """How long ``async_save`` holds training up."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    results = []
    for number in range(4):
        place = root / f"peer-{number}"
        begin = time.perf_counter()
        saved: Any = async_save(run.held(), checkpoint_id=str(place))
        results.append(time.perf_counter() - begin)
        saved.result()
        shutil.rmtree(place)
    return results[1:]


def wrong_versions(
    *, config: ModelConfig, root: Path, steps: int, bytes_per_s: float, guarded: bool
) -> int:
    """Steps whose checkpoint is missing or not that step's state, bit for bit, on a slow disk."""
    run = DataStatesTraining(config, 32)
    store = slow_store(root, EmulatedLink(bytes_per_s))
    store.keep = steps
    saver: Saver = SAVE_MODES.build({"name": "lazy", "host_buffer": 2**24}).build(
        store, SinglePeer()
    )
    truth: dict[int, dict[str, Tensor]] = {}
    tickets: list[SaveTicket] = []
    with closing(saver):
        for step in range(1, steps + 1):
            run.step(saver.before_update if guarded else lambda: None)
            truth[step] = {name: tensor.clone() for name, tensor in run.held().items()}
            tickets.append(saver.save(step, run.held(), {}))
    wrong = 0
    for ticket in tickets:
        try:
            ticket.wait()
            saved = store.open(ticket.step)
        except CheckpointError:
            wrong += 1
        else:
            right = truth[ticket.step].items()
            wrong += any(not torch.equal(saved.tensor(name), value) for name, value in right)
    return wrong
