"""[120] Sequence parallelism: how much more fits if ranks share the tokens, not the matrices?

One layer of BERT (768 wide, 12 heads made 16 for eight ranks, sequences of 512, fp32, no dropout)
on threads. Counted is every storage that autograd is given, once, and weights, gradients and
AdamW's moments; a rank has the paper's 16 GiB over 12 layers. Runs that fill the budget are a
quarter as wide and long, with 16 projected rows for 64 and a sixteenth of the budget, which keeps
every ratio. With 64 ranks nothing is run: counts of 2, 4 and 8 are fitted by a / N + b, in favour
of tensor parallelism, whose 16 heads 64 ranks cannot share. Dense attention keeps whole rows of
scores, as in the paper; ring attention, which keeps none, is in the details. The A/A run has tensor
parallelism, and dense attention.

Source: Li et al., Sequence Parallelism: Long Sequence Training from System Perspective, 2021.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge, Le

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import part
from shoal.cost.context.ways import Split, layer_memory

if TYPE_CHECKING:
    from shoal.claims.experiments.sequence_parallel_ranks import Kind, RankBytes, Shape

_TENSOR: Kind = "tensor"
_KINDS: tuple[Kind, ...] = ("sequence", _TENSOR)
_ITEMSIZE = 4
_WORLDS = (2, 4, 8)
_MOST, _FAR = 8, 64
_LAYERS = 12
_HIDDEN, _HEADS, _LENGTH, _ROWS = 768, 16, 512, 64
# A quarter of every length is a sixteenth of every number of bytes.
_QUARTER = 4


@part
class SequenceParallel(BaseClaim, row=120):
    """Bytes kept by 2, 4 and 8 ranks, and what fits into a budget.

    Args:
        device_gib: memory of a rank, for 12 layers; more than 32 would be run for long, and less
            than 2 holds hardly more than weights.
    """

    device_gib: Annotated[float, Ge(2), Le(32)] = 16.0

    def collect(self, run: ClaimRun) -> None:
        """Count; the full run counts at full width and also fills the budget, for a minute.

        The quick run counts a layer of a quarter of the width, and solves for what would fill it.
        """
        context = run.context
        shared: Kind = run.pick("sequence", _TENSOR)
        sparse: Kind = run.pick("projected", "sequence")
        small = _shape(_QUARTER)
        shape, scale = (small, _QUARTER) if run.quick else (_shape(1), 1)
        counted = {
            (kind, world): [
                _counted(context, shape._replace(batch=batch), kind, world, train=batch == 1)
                for batch in (1, 2)
            ]
            for kind in _KINDS
            for world in _WORLDS
        }
        run.put("memory_rules", _rules(context, shared))
        fits = {kind: [_line(counted[kind, world]) for world in _WORLDS] for kind in _KINDS}
        budget = self.device_gib * 2**30 / _LAYERS
        batches, lengths = (
            (_solved_batch, _solved_length) if run.quick else (_filled_batch, _filled_length)
        )
        full = partial(batches, context, small, budget=budget / _QUARTER**2)
        far = {kind: _far_batch(fits[kind], budget / scale**2) for kind in fits}
        run.progress("longest sequences", 0.6)
        longest = partial(lengths, context, small, budget=budget / _QUARTER**2)
        ring = _solved_length(context, small, "ring", budget=budget / _QUARTER**2)
        run.put("batch_ratio_8", full(shared), full(_TENSOR))
        run.put("batch_ratio_64", far[shared], far[_TENSOR])
        ours, dense = longest(sparse), longest("sequence")
        run.put("length_ratio", ours, dense)
        run.put("model_error", _errors(shape, counted, shared))
        # Of the layer in full width, as projected attention with the same budget.
        longest_of = {"projected or its baseline": ours, "dense": dense, "ring": ring}
        run.details["longest"] = {name: _QUARTER * n for name, n in longest_of.items()}


def largest(fits: Callable[[int], bool], guess: int, step: int = 1) -> int:
    """Largest multiple of ``step`` that fits, tried from ``guess`` on; 0 if none does."""
    at = max(0, guess // step) * step
    if at and not fits(at):
        while at and not fits(at):
            at -= step
        return at
    while fits(at + step):
        at += step
    return at


def _shape(scale: int) -> Shape:
    from shoal.claims.experiments.sequence_parallel_ranks import Shape

    return Shape(_HIDDEN // scale, _HEADS, _LENGTH // scale, 1, _ROWS // scale)


def _counted(
    context: ExperimentContext, shape: Shape, kind: Kind, world: int, *, train: bool = True
) -> RankBytes:
    """What is kept, counted once for the run and the A/A run."""
    from shoal.claims.experiments.sequence_parallel_ranks import count

    def counted() -> RankBytes:
        context.progress(f"{kind}, {world} ranks, {shape.batch} x {shape.length}", 0.3)
        return count(shape, kind, world, train=train)

    return context.remember(f"{shape} {kind} {world} {train}", counted)


def _errors(
    shape: Shape, counted: dict[tuple[Kind, int], list[RankBytes]], shared: Kind
) -> list[float]:
    """|counted / modelled - 1| of states and activations."""
    errors: list[float] = []
    for kind, world in counted:
        # The kind that takes the place of ``sequence`` in the A/A run.
        result = counted[shared if kind == "sequence" else kind, world][0]
        split: Split = "tensor" if kind == "tensor" else "sequence"
        model = layer_memory(split, world=world, **_sizes(shape))
        for got, wanted in (
            (result.states, model.states),
            (result.activations, model.activations),
        ):
            errors.append(abs(sum(got.values()) / (_ITEMSIZE * wanted) - 1))
    return errors


def _sizes(shape: Shape) -> dict[str, int]:
    return {
        "batch": shape.batch,
        "length": shape.length,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "head_dim": shape.hidden // shape.heads,
    }


def _rules(context: ExperimentContext, shared: Kind) -> list[bool]:
    """Whether counted bytes obey the paper's rules, 20 % below and above where they turn."""
    from shoal.claims.experiments.sequence_parallel_ranks import Shape

    hidden, length = 48, 16
    values: list[bool] = []
    turns = {"mlp": 32 * hidden, "attention": 16 * hidden}
    for world, (name, turn), share in itertools.product(_WORLDS, turns.items(), (0.8, 1.2)):
        shape = Shape(hidden, _HEADS, length, round(share * turn / length))
        kept = []
        for kind in (shared, _TENSOR):
            one = _counted(context, shape, kind, world)
            kept.append(one.states[name] + one.activations[name])
        values.append((kept[0] < kept[1]) == (shape.batch * length > turn))
    return values


def _line(counts: Sequence[RankBytes]) -> tuple[float, float]:
    """Bytes of states, and of the activations of one sequence, from batches of 1 and 2."""
    one, two = (sum(c.activations.values()) for c in counts)
    return sum(counts[0].states.values()), two - one


def _far_batch(lines: Sequence[tuple[float, float]], budget: float, world: int = _FAR) -> int:
    """The largest batch on more ranks than were run, both numbers fitted by a / N + b."""
    shares = np.array([[1 / n, 1.0] for n in _WORLDS])
    states, each = np.array([1 / world, 1.0]) @ np.linalg.lstsq(shares, np.array(lines))[0]
    return int((budget - states) / each)


def _solved_batch(context: ExperimentContext, shape: Shape, kind: Kind, *, budget: float) -> int:
    """The largest batch on 8 ranks by what was counted of 1 and 2 sequences."""
    states, each = _line(
        [
            _counted(context, shape._replace(batch=batch), kind, _MOST, train=batch == 1)
            for batch in (1, 2)
        ]
    )
    return int((budget - states) / each)


def _filled_batch(context: ExperimentContext, shape: Shape, kind: Kind, *, budget: float) -> int:
    """The same, run: one sequence more does not fit."""
    states = sum(_counted(context, shape, kind, _MOST).states.values())

    def fits(batch: int) -> bool:
        run = _counted(context, shape._replace(batch=batch), kind, _MOST, train=False)
        return states + sum(run.activations.values()) <= budget

    return largest(fits, _solved_batch(context, shape, kind, budget=budget))


def _solved_length(context: ExperimentContext, shape: Shape, kind: Kind, *, budget: float) -> int:
    """The longest sequence on 8 ranks by what was counted of three short ones."""
    lengths = [shape.length * times for times in (1, 2, 4)]
    totals = [_counted(context, shape._replace(length=n), kind, _MOST).total for n in lengths]
    square, each, base = np.polyfit(lengths, totals, 2)
    if abs(square) * budget / each < each / 100:  # a straight line, and what rounding left
        most = (budget - base) / each
    else:
        most = (-each + (each**2 + 4 * square * (budget - base)) ** 0.5) / (2 * square)
    return int(most) // _MOST * _MOST


def _filled_length(context: ExperimentContext, shape: Shape, kind: Kind, *, budget: float) -> int:
    """The same, run: a sequence that is one token a rank longer does not fit."""

    def fits(length: int) -> bool:
        return _counted(context, shape._replace(length=length), kind, _MOST).total <= budget

    return largest(fits, _solved_length(context, shape, kind, budget=budget), _MOST)
