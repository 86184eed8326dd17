"""State in host memory: copies over PCIe, and a step whose weights and moments live there.

Prediction: the price of the link, and the step time of the plan.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu.frame import Case
from gpu.place import Place
from gpu.timing import elapsed, in_turn, judged
from gpu.training import job, steps, trainer
from shoal.cost.price.host_link import copy_bytes_per_s
from shoal.ir import TrainJob
from shoal.train.build import weights_of
from shoal.train.planning import plan_job

NEEDS = ("torch",)
POLICIES: dict[str, dict[str, Any]] = {
    "zero_infinity": {"name": "zero_infinity", "param": "host", "optim": "host"},
    "superpipeline": {"name": "superpipeline"},
}
FULL, TINY = ("SmolLM2-360M", 1024, 8), ("shoal-0.3m", 16, 2)


def cases(place: Place) -> Iterator[Case]:
    """Copies, then a case a policy."""
    size = place.pick(2**30, 2**16)
    for way in ("host to device", "device to host"):
        yield Case(f"copy of pinned memory, {way}", 20.0,
                   functools.partial(_predict_copy, place, 2**30),
                   functools.partial(_copy, place, way, size))  # fmt: skip
    for name in POLICIES:
        yield Case(f"training, {name}", 120.0, functools.partial(_predict, place, name),
                   functools.partial(_measure, place, name))  # fmt: skip


def _predict_copy(place: Place, size: int) -> dict[str, Any]:
    rate = copy_bytes_per_s(place.machine)
    return {"seconds": size / rate, "bytes_per_s": rate}


def _copy(place: Place, way: str, size: int) -> dict[str, Any]:
    host = torch.empty(size, dtype=torch.uint8, pin_memory=not place.dry)
    plain = torch.zeros(size, dtype=torch.uint8)
    there = torch.empty(size, dtype=torch.uint8, device=place.device)
    copies: dict[str, Callable[[], object]] = {
        "pinned": lambda: there.copy_(host, non_blocking=True),
        "pageable": lambda: there.copy_(plain),
    }
    if way == "device to host":
        copies = {
            "pinned": lambda: host.copy_(there, non_blocking=True),
            "pageable": lambda: plain.copy_(there),
        }
    turns = {name: functools.partial(elapsed, place, copy) for name, copy in copies.items()}
    result = judged(in_turn(place, turns, rounds=9, warmup=2))
    return {**result, "bytes_per_s": size / result["seconds"]}


def offloaded(size: tuple[str, int, int], name: str) -> TrainJob:
    """The job of a policy."""
    return job(size, compile=False, offload=POLICIES[name], precision="bf16")


def _predict(place: Place, name: str) -> dict[str, Any]:
    step_s = plan_job(offloaded(FULL, name), place.machine).estimate.step_s
    return {"seconds": step_s.value, "low": step_s.low, "high": step_s.high}


def _measure(place: Place, name: str) -> dict[str, Any]:
    size = place.pick(FULL, TINY)
    jobs = {name: offloaded(size, name), "resident": job(size, compile=False)}
    turns: dict[str, Callable[[], float]] = {}
    with contextlib.ExitStack() as undo:
        for key, wanted in jobs.items():
            made = plan_job(wanted, place.machine)
            one = trainer(place, made, weights_of(made.job))
            undo.enter_context(contextlib.closing(one))
            turns[key] = steps(place, one)
        result = judged(in_turn(place, turns, rounds=7, warmup=3))
    return {**result, "what": f"{size[0]}, {size[1] * size[2]} tokens a step"}
