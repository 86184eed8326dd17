"""The least budget of a device is enough for every step, however slowly things leave it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_runs import config, job

from shoal.claims.lab.same_as_one import SeededWeights, tokens
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.memory.tiers.mover import Mover, Ticket
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences

MODEL = config(hidden=128, num_layers=4, head_dim=32, ffn_hidden=512)


def peak(place: Path, steps: int = 3, **offload: Any) -> int:
    """Most bytes of the device in use during some steps of one rank."""
    wanted = job(grad_clip=0, offload=offload)

    def on(comm: Any) -> int:
        engine = ParallelEngine(
            wanted, check_split(wanted, MODEL.shape()), SeededWeights(MODEL, 0), comm, place=place
        )
        model: Any = engine.sharded
        try:
            for step in range(steps):
                drawn = tokens(wanted, MODEL.vocab_size, step, documents=False)
                rows = ReplicaSequences(drawn.inputs, drawn.targets, None, 0, step)
                if hasattr(model, "begin"):
                    model.begin(1.0)
                engine.backward(rows, 2, int((drawn.targets != -100).sum()))
                engine.finish()
                engine.grad_norm()
                model.step(1.0)
            return model.tiers.peaks()["device"]
        finally:
            model.close()

    return run_ranks(1, on)[0]


class Unhurried(Ticket):
    """A copy that begins when somebody waits for it."""

    def __init__(self, nbytes: int, start: Callable[[], Ticket]) -> None:
        super().__init__(nbytes)
        self._start, self._begun, self._lock = start, False, threading.Lock()

    def wait(self) -> float:
        with self._lock:
            if not self._begun:
                self._begun, start = True, self._start
                del self._start
                start().wait()
                self.finish(0.0)
        return super().wait()


@pytest.mark.parametrize(
    "offload",
    [
        {"name": "superpipeline", "k": 2, "k_prime": 1},
        {"name": "deep_optimizer_states", "stride": 0},
        {"name": "zero_infinity", "host_budget": "64MiB", "param": "host", "optim": "host"},
        pytest.param(
            {"name": "fuyou", "host_budget": "96MiB", "swap_capacity": "64MiB"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda one: one["name"],
)
def test_what_leaves_the_device_takes_no_room(
    offload: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    submit = Mover.submit

    def at_once(self: Mover, *args: Any, **options: Any) -> Ticket:
        ticket = submit(self, *args, **options)
        ticket.wait()
        return ticket

    def unhurried(self: Mover, work: Any, nbytes: int, **options: Any) -> Ticket:
        if self.name not in ("device-host", "down"):
            return submit(self, work, nbytes, **options)
        return Unhurried(nbytes, functools.partial(submit, self, work, nbytes, **options))

    with monkeypatch.context() as patch:
        patch.setattr(Mover, "submit", at_once)
        least = peak(tmp_path / "one", steps=1, **offload)
    monkeypatch.setattr(Mover, "submit", unhurried)
    assert peak(tmp_path / "two", device_budget=least, **offload) <= least
