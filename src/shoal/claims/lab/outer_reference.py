"""The workers of a run one after the other, in one process: what their ranks must equal.

Written from the formulas, tensor by tensor, and nothing here is shared with the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.parallel.outer.averaging import Averaging
from shoal.parallel.outer.co2 import CO2, CONST, EPS
from shoal.parallel.outer.diloco import DiLoCo


@dataclass
class _State:
    """The outer model ``x`` and what its update keeps, for each tensor."""

    x: list[Tensor]
    m: list[Tensor] = field(init=False)
    largest: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.m = [torch.zeros_like(x) for x in self.x]
        self.largest = [torch.zeros((), dtype=x.dtype) for x in self.x]


def simulate(
    part: Averaging,
    start: Sequence[Tensor],
    inner: Callable[[int, int, list[Tensor]], None],
    *,
    workers: int,
    steps: int,
) -> list[list[Tensor]]:
    """Train ``workers`` workers by ``inner(worker, step, parameters)`` for ``steps`` steps each.

    Returns the parameters at each round's start, which are those of all workers, and at the end.
    """
    assert part.tau != "auto"
    state = _State([x.clone() for x in start])
    notes = [[x.clone() for x in state.x]]
    waiting: list[Tensor] | None = None
    for first in range(0, steps, part.tau):
        last = min(first + part.tau, steps)
        changes = []
        for worker in range(workers):
            mine = [x.clone() for x in state.x]
            for step in range(first, last):
                inner(worker, step, mine)
            changes.append([x - y for x, y in zip(state.x, mine, strict=True)])
        mean = [_sum(part, deltas) / workers for deltas in zip(*changes, strict=True)]
        if not part.delayed:
            _update(part, state, mean)
        else:
            if waiting is not None:
                _update(part, state, waiting)
            waiting = mean
            if last == steps:  # the last round is not lost
                _update(part, state, waiting)
        notes.append([x.clone() for x in state.x])
    return notes


def _sum(part: Averaging, values: Sequence[Tensor]) -> Tensor:
    """In the order of the workers, in the dtype that travels."""
    dtype = values[0].dtype
    if part.dtype == "bf16":
        values = [value.bfloat16() for value in values]
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total.to(dtype)


def _update(part: Averaging, state: _State, mean: list[Tensor]) -> None:
    """One outer update of every tensor."""
    for number, delta in enumerate(mean):
        x, m = state.x[number], state.m[number]
        if isinstance(part, CO2):
            if part.penalty == "gap":
                size = torch.linalg.vector_norm(delta)
                state.largest[number] = torch.maximum(state.largest[number], size)
                moved = part.outer_lr * torch.linalg.vector_norm(m)
                delta = delta / (1 + moved / (state.largest[number] + EPS))
            elif part.penalty == "const":
                delta = delta / CONST
            if part.clip is not None:
                delta = delta.clamp(-part.clip, part.clip)
            m = part.outer_momentum * m + delta
            x = torch.sub(x, m, alpha=part.outer_lr)
        elif isinstance(part, DiLoCo):
            m = part.outer_momentum * m + delta
            ahead = torch.add(delta, m, alpha=part.outer_momentum)
            x = torch.sub(x, ahead, alpha=part.outer_lr)
        else:
            x = x - delta
        state.x[number], state.m[number] = x, m
