"""What the ranks of claim [139] GPipe do: steps of equal layers, their times and saved bytes."""

from __future__ import annotations

import time
from collections import Counter

import torch
from torch import Tensor, nn

from shoal.claims.lab.gpipe import Pipeline, gpipe
from shoal.claims.ranks import in_turn
from shoal.parallel.protocols import Comm


class AutogradBytes:
    """Counts the bytes that autograd keeps for backward passes, those of parameters aside."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._known = {p.untyped_storage().data_ptr() for p in parameters}
        self._held: Counter[int] = Counter()
        self.now = self.peak = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context around passes."""
        return torch.autograd.graph.saved_tensors_hooks(
            lambda x: _Kept(self, x), lambda kept: kept.tensor
        )

    def add(self, x: Tensor, by: int) -> None:
        """A node of the graph takes (1) or releases (-1) a tensor."""
        at = x.untyped_storage().data_ptr()
        if at in self._known:
            return
        before = self._held[at]
        self._held[at] += by
        if (before == 0) == (by > 0) and (before == 0 or self._held[at] == 0):
            self.now += by * x.untyped_storage().nbytes()
            self.peak = max(self.peak, self.now)


class _Kept:
    """A tensor that a node keeps; it is released with the node."""

    def __init__(self, counts: AutogradBytes, tensor: Tensor) -> None:
        self._counts, self.tensor = counts, tensor
        counts.add(tensor, 1)

    def __del__(self) -> None:
        self._counts.add(self.tensor, -1)


def equal_layers(number: int, width: int) -> list[nn.Module]:
    """Equal layers: each a product and a nonlinearity, both of which keep their input."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(number)]


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return (out * target).mean()


def _made(comm: Comm, layers: int, width: int, m: int, recompute: bool) -> Pipeline:
    made = equal_layers(layers, width)
    return gpipe(made, comm.world, m, recompute, [1.0] * layers, comm=comm, loss=_loss)


def saved_bytes(
    comm: Comm, *, layers: int, width: int, batch: int, m: int, recompute: bool
) -> float:
    """Most bytes that a rank keeps for the backward pass: what autograd holds, and inputs."""
    pipeline = _made(comm, layers, width, m, recompute)
    x = torch.ones(batch, width)
    pipeline.step(x, x)
    saved = AutogradBytes([*pipeline.parameters(), x])
    with saved.hooks():
        pipeline.step(x, x)
    # The runtime holds the inputs of cells, which no node of a graph has while it is computed
    # again later.
    return saved.peak + (x.nbytes if recompute else 0.0)


def times(
    comm: Comm, *, layers: int, width: int, batch: int, ms: list[int], recompute: bool, repeats: int
) -> dict[str, list[float]]:
    """Seconds of steps with each number of micro-batches, in turn."""
    pipelines = [_made(comm, layers, width, m, recompute) for m in ms]
    x = torch.ones(batch, width)
    arms = {
        str(at): lambda pipeline=pipeline: pipeline.step(x, x)
        for at, pipeline in enumerate(pipelines)
    }
    return in_turn(comm, arms, repeats)


def pass_times(
    comm: Comm, *, layers: int, width: int, batch: int, ms: list[int], repeats: int
) -> dict[str, list[list[float]]]:
    """Number of micro-batches -> seconds of a forward and of a recomputing backward pass, by turn.

    On one rank through all layers, in turn with other numbers; a cell of a kth of them takes a kth.
    """
    made = nn.Sequential(*equal_layers(layers, width))
    pass_times: dict[str, list[list[float]]] = {str(m): [] for m in ms}
    parts = {m: torch.ones(batch // m, width, requires_grad=True) for m in set(ms)}
    for turn in range(-1, repeats):
        for m in ms[:: 1 if turn % 2 else -1]:
            begin = time.perf_counter()
            with torch.no_grad():
                for _ in range(m):
                    made(parts[m])
            middle = time.perf_counter()
            for _ in range(m):
                made(parts[m]).mean().backward()
            if turn >= 0:
                end = time.perf_counter()
                pass_times[str(m)].append([(middle - begin) / m, (end - middle) / m])
    return pass_times
