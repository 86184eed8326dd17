"""Cut a sequence of layers into the stages of a pipeline.

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism, 2018 (layers with costs, cut into cells); Yeung et al., Balancing Pipeline
Parallelism with Vocabulary Parallelism, 2024 (fewer blocks beside the output layer, the baseline).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Literal

from shoal.core.errors import PlanError, require
from shoal.cost.arithmetic import attention_width, linears
from shoal.ir import ModelShape, Schedule


def partition(costs: Sequence[float], cells: int) -> tuple[range, ...]:
    """Contiguous, non-empty cells whose greatest cost is as small as it can be.

    Of several such cuts that of the smallest variance; of several of those the one whose first
    cells have more layers. Exact: sums are taken in integers.

    Args:
        costs: cost of each layer, in any unit, at least 0.
        cells: number of cells.

    Raises:
        PlanError: more cells than layers, or a cost that is negative or not finite.
    """
    require(
        1 <= cells <= len(costs),
        "cells",
        cells,
        expected=f"1 to {len(costs)}, the number of layers",
        error=PlanError,
    )
    for layer, cost in enumerate(costs):
        require(
            math.isfinite(cost) and cost >= 0,
            f"cost of layer {layer}",
            cost,
            expected="a number of at least 0",
            error=PlanError,
        )
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    sums = [0, *accumulate(int(cost * unit) for cost in exact)]
    limit = _least_maximum(sums, cells)
    return _flattest(sums, cells, limit)


def _least_maximum(sums: Sequence[int], cells: int) -> int:
    """The smallest greatest cost, by bisection: a limit holds if greedy cells keep to it."""
    low = max(b - a for a, b in pairwise(sums))
    high = sums[-1]
    while low < high:
        middle = (low + high) // 2
        start = used = 0
        while start < len(sums) - 1 and used <= cells:
            start = bisect_right(sums, sums[start] + middle) - 1
            used += 1
        if used <= cells:
            high = middle
        else:
            low = middle + 1
    return low


def _flattest(sums: Sequence[int], cells: int, limit: int) -> tuple[range, ...]:
    """Among cuts that keep to ``limit`` the one with the smallest sum of squared costs."""
    layers = len(sums) - 1
    # From layer i on with k cells: (sum of squares, end of the first cell).
    best: list[tuple[int, int] | None] = [None] * layers + [(0, layers)]
    table = []
    for k in range(1, cells + 1):
        row: list[tuple[int, int] | None] = [None] * (layers + 1)
        for start in range(layers - k, -1, -1):
            # Every cell after this one needs a layer.
            end = min(bisect_right(sums, sums[start] + limit) - 1, layers - k + 1)
            for stop in range(end, start, -1):
                rest = best[stop]
                if rest is None:
                    continue
                squares = rest[0] + (sums[stop] - sums[start]) ** 2
                result = row[start]
                if result is None or squares < result[0]:
                    row[start] = squares, stop
        table.append(row)
        best = row
    found_cells, start = [], 0
    for row in reversed(table):
        chosen = row[start]
        assert chosen is not None  # the limit was found with as many cells
        found_cells.append(range(start, chosen[1]))
        start = chosen[1]
    return tuple(found_cells)


def uniform_stages(num_layers: int, pp: int, vpp: int = 1) -> tuple[range, ...]:
    """``pp * vpp`` stages of equally many layers.

    Raises:
        PlanError: the layers cannot be shared equally; names the numbers of stages that could.
    """
    stages = pp * vpp
    legal = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
    require(
        stages in legal,
        "parallel.pp * parallel.vpp",
        f"{pp} * {vpp} = {stages}",
        expected=f"a divisor of {num_layers} layers: {', '.join(map(str, legal))}",
        error=PlanError,
    )
    each = num_layers // stages
    return tuple(range(i * each, (i + 1) * each) for i in range(stages))


def block_costs(
    shape: ModelShape, *, seq_len: int | None = None
) -> tuple[tuple[float, ...], float]:
    """FLOP of a forward pass for one token: of each block, and of the output layer.

    Looking up the embedding takes no arithmetic. Backward passes cost twice as much everywhere,
    so the proportions are those of a whole step.

    Args:
        shape: the model.
        seq_len: tokens of a sequence, for the attention; its longest one if not given.
    """
    length = shape.max_position if seq_len is None else seq_len
    attention = 4.0 * shape.num_heads * attention_width(shape) * ((length + 1) / 2)
    everywhere, dense, sparse, output = attention, 0.0, 0.0, 0.0
    for linear in linears(shape):
        one = linear.flops_per_token / linear.layers
        if linear.role == "output":
            output = one
        elif linear.name.startswith("ffn"):
            dense += one
        elif linear.role in ("expert", "mixture"):
            sparse += one
        else:
            everywhere += one
    first_sparse = shape.num_dense_layers if shape.num_experts else shape.num_layers
    return (
        tuple(
            everywhere + (dense if layer < first_sparse else sparse)
            for layer in range(shape.num_layers)
        ),
        output,
    )


def stages_for(
    shape: ModelShape,
    stages: int,
    *,
    vocab_split: Literal["none", "tp", "pp"] = "pp",
    seq_len: int | None = None,
) -> tuple[range, ...]:
    """Blocks of each stage such that the slowest stage is as fast as it can be.

    With ``pp`` no stage holds the vocabulary, and blocks alone are shared. Otherwise the last
    stage has the output layer as well and gets fewer blocks (``tp`` divides blocks and output
    layer alike); every stage keeps at least one block.

    Args:
        shape: the model.
        stages: number of stages, pp * vpp.
        vocab_split: who splits embedding and output layer.
        seq_len: tokens of a sequence; the model's longest if not given.

    Raises:
        PlanError: more stages than blocks.
    """
    require(
        1 <= stages <= shape.num_layers,
        "stages (parallel.pp * parallel.vpp)",
        stages,
        expected=f"1 to {shape.num_layers}, the blocks of {shape.name}",
        error=PlanError,
    )
    blocks, output = block_costs(shape, seq_len=seq_len)
    if vocab_split != "pp":
        blocks = (*blocks[:-1], blocks[-1] + output)
    return partition(blocks, stages)


def cells_for(
    shape: ModelShape,
    schedule: Schedule,
    *,
    vocab_split: Literal["none", "tp", "pp"] = "pp",
    given: Sequence[int] = (),
) -> tuple[range, ...]:
    """Blocks of each cell of a schedule: those of its stages, or of the stages' replicas.

    A cell that is the output layer alone has none, and the others share the blocks as if there
    were no output layer.

    Args:
        shape: the model.
        schedule: of which the cells are taken.
        vocab_split: as for :func:`stages_for`.
        given: number of blocks of each stage, where the job says it.

    Raises:
        PlanError: more stages than blocks, or stages that do not hold the blocks.
    """
    if given:
        require(
            not schedule.cells and len(given) == schedule.stages and sum(given) == shape.num_layers,
            "parallel.stages",
            ", ".join(map(str, given)),
            expected=f"{schedule.stages} numbers that add up to the {shape.num_layers} blocks of "
            f"{shape.name}, with a schedule whose stages are not replicas",
            error=PlanError,
        )
        ends = accumulate(given)
        return tuple(range(end - own, end) for own, end in zip(given, ends, strict=True))
    if not schedule.bare_head:
        return stages_for(shape, schedule.num_cells, vocab_split=vocab_split)
    last = range(shape.num_layers, shape.num_layers)
    return (*stages_for(shape, schedule.num_cells - 1, vocab_split="pp"), last)
