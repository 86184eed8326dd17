"""Where the sums of gradients travel while the backward pass of a mixture goes on.

Layers finish from the last to the first. What a finished layer has to sum between nodes travels in
slices while earlier layers are computed: in the dense part of a block the network between nodes is
idle, and in the experts' part it idles between the chunks that it sends and those that it sends
back. These holes are filled first, the deepest layer's gradients first, each to the byte. What is
left is given to the experts' parts by differential evolution, since a longer slice may be worth
another number of chunks, or waits for the end of the pass.

Source: Pan et al., FSMoE, 2025, section 5; Storn and Price, Differential Evolution, 1997.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shoal.core.errors import PlanError, require
from shoal.cost.training.moe_makespan import makespan
from shoal.cost.training.moe_tasks import Line, MoeLayer
from shoal.plan.experts.moe_overlap import MOST, choose, room


class GradientSlice(NamedTuple):
    """A part of the gradients' sum.

    Args:
        layer: number of the block with whose backward pass it is sent.
        where: dense or experts.
        bytes: of gradients.
        seconds: on the network between nodes.
    """

    layer: int
    where: str
    bytes: float
    seconds: float


class Partition(NamedTuple):
    """A backward pass with its sums.

    Args:
        r: by block from first to last, chunks of its experts' backward pass.
        slices: in the order in which they are sent.
        tail: the bytes that are sent after all layers.
        tail_s: seconds of that.
        seconds: of the whole backward pass, its tail included.
        greedy_s: the same, if holes alone are filled.
    """

    r: tuple[int, ...]
    slices: tuple[GradientSlice, ...]
    tail: float
    tail_s: float
    seconds: float
    greedy_s: float


def _fits(line: Line, seconds: float) -> float:
    """Bytes that are summed in so many seconds."""
    return max(0.0, (seconds - line.alpha) / line.beta) if line.beta else 0.0


def _seconds(line: Line, size: float) -> float:
    return line.alpha + line.beta * size if size > 0 else 0.0


class _Walk(NamedTuple):
    seconds: float
    r: tuple[int, ...]
    slices: tuple[GradientSlice, ...]
    tail: float


def partition(layers: Sequence[MoeLayer], *, most: int = MOST, seed: int = 0) -> Partition:
    """Cut the sums of gradients into slices that cost as little as can be.

    Args:
        layers: blocks, first to last.
        most: chunks to look at.
        seed: of the search for what no hole has room for.

    Raises:
        PlanError: no layers.
    """
    from scipy.optimize import Bounds, differential_evolution

    require(bool(layers), "layers", 0, expected="at least one block", error=PlanError)
    kinds = {layer.backward: choose(layer.backward, most=most) for layer in set(layers)}
    chosen = [kinds[layer.backward] for layer in layers]
    holes = [room(layer.backward, one.r) for layer, one in zip(layers, chosen, strict=True)]
    tops = [min(most, layer.backward.tokens) for layer in layers]

    def best(number: int, slice_s: float) -> tuple[float, int]:
        """Seconds and chunks of a block's experts with a slice that is longer than its hole."""
        own = layers[number].backward
        return min((makespan(own, r, slice_s), r) for r in range(1, tops[number] + 1))

    def walk(shares: Sequence[float], *, exact: bool) -> _Walk:
        """Go backward through the blocks; ``shares`` of what then still waits goes with each."""
        waiting = total = 0.0
        taken: list[int] = []
        slices: list[GradientSlice] = []
        for number in reversed(range(len(layers))):
            layer, line = layers[number], layers[number].all_reduce
            fits = min(waiting, _fits(line, holes[number]))
            size = fits + shares[number] * (waiting - fits)
            seconds, sums, r = chosen[number].seconds, _seconds(line, size), chosen[number].r
            if sums > holes[number] and size > 0:
                seconds, r = best(number, sums) if exact else (makespan(layer.backward, r, sums), r)
            if size > 0:
                slices.append(GradientSlice(number, "experts", size, sums))
            waiting -= size
            taken.append(r)
            size = min(waiting, _fits(line, layer.dense_backward_s))
            if size > 0:
                slices.append(GradientSlice(number, "dense", size, _seconds(line, size)))
            waiting += layer.gradient - size
            total += seconds + layer.dense_backward_s
        total += _seconds(layers[0].all_reduce, waiting)
        return _Walk(total, tuple(reversed(taken)), tuple(slices), waiting)

    def spent(shares: np.ndarray) -> float:
        return walk(shares.tolist(), exact=False).seconds

    none = [0.0] * len(layers)
    greedy = result = walk(none, exact=True)
    # The first block's own gradients are ready at the end: they never travel sooner.
    if greedy.tail > layers[0].gradient and len(layers) > 1:
        end = differential_evolution(
            spent,
            Bounds([0.0] * len(layers), [1.0] * len(layers)),
            x0=np.zeros(len(layers)),
            maxiter=15,
            popsize=4,
            polish=False,
            rng=seed,
        )
        result = min(greedy, walk(end.x.tolist(), exact=True), key=lambda one: one.seconds)
    line = layers[0].all_reduce
    return Partition(
        result.r, result.slices, result.tail, _seconds(line, result.tail), result.seconds,
        greedy.seconds,
    )  # fmt: skip
