"""Saved and loaded state holds no NaN and no infinity, and a step that has some says where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.checkpoint.finite import FiniteCheck, of_tensors
from shoal.checkpoint.peers import CommPeers
from shoal.core.errors import NonFiniteError
from shoal.ir.hooks import StepHook, TrainStep
from shoal.kernel.tensors import local
from shoal.memory.protocols import EarlyUpdater

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.pieces import Piece
    from shoal.ir.comm import Comm
    from shoal.parallel.engine import ParallelEngine
    from shoal.train.protocols import Updater

# Tensors, and groups of ranks, named in a message.
_NAMED = 3


class FiniteHook(StepHook):
    """Ends a run before an update by a loss or a gradient that is not finite.

    Args:
        lr: peak learning rate, for the message.
    """

    kind = "finite"

    def __init__(self, engine: ParallelEngine, updater: Updater, lr: float) -> None:
        self._engine, self._updater, self._lr = engine, updater, lr

    def before_update(self, step: TrainStep) -> None:
        """All ranks have the same numbers; where one is not finite, all look for its origin.

        Raises:
            NonFiniteError: the loss or the norm is not.
        """
        engine, peers, norm = self._engine, self._engine.ranks.peers, float(step.norm)
        if not math.isfinite(step.loss):
            what = f"the loss is {step.loss}"
            origin = bad_loss(engine, self._updater, peers, step.own)
        elif not math.isfinite(norm):
            # It is of the gradients of all ranks: one of them that is not finite makes it so.
            what = f"the norm of the gradients is {norm}"
            origin = bad_gradients(engine, peers)
        else:
            return
        detail = f"; not finite: {origin}" if origin else ""
        raise NonFiniteError(
            f"step {step.number}: {what}{detail}; lower optimizer.lr (now {self._lr:g}) or use "
            "precision: fp32, and continue with --resume"
        )


def non_finite(pieces: Mapping[str, Sequence[Piece]]) -> str:
    """What is NaN or infinite in the state of a rank; empty if nothing is.

    Args:
        pieces: name -> pieces.

    Returns:
        How many tensors of how many, and the first of them by name.
    """
    tensors = of_tensors([(name, part.tensor) for name, parts in pieces.items() for part in parts])
    if not tensors.bad:
        return ""
    return (
        f"{len(tensors.bad)} of {tensors.total} tensors have values that are NaN or infinite: "
        f"{_first(tensors.bad)}"
    )


def bad_gradients(engine: ParallelEngine, comm: Comm) -> str:
    """Which ranks hold gradients that are not finite, and of which parameters; all ranks call it.

    A gradient that ranks have summed is not finite on every rank that holds the sum.

    Args:
        engine: between its ``finish`` and the update.
        comm: the ranks that make the update together.

    Returns:
        Ranks, how many gradients of how many, and the first of them by name; empty for none.
    """
    tensors = of_tensors(_gradients(engine))
    return _of_ranks(comm, _described(tensors, "gradients"))


def bad_loss(
    engine: ParallelEngine, updater: Updater, comm: Comm, own: Tensor | None = None
) -> str:
    """Why a loss is not finite: weights that are not, or else whose rows; all ranks call it.

    Args:
        engine: after its backward pass.
        updater: of the engine's weights.
        comm: the ranks that sum the loss.
        own: what this rank has added to the sum; None if unknown.

    Returns:
        Ranks, how many weights of how many, and the first of them by name; or ranks alone; empty
            where nothing is known.
    """
    text = ""
    if not isinstance(updater, EarlyUpdater):  # what this loss has made of weights is no reason
        held = [(name, box.tensor) for name, boxes in engine.held().items() for box in boxes]
        text = _described(of_tensors(held), "weights")
    if loss := _of_ranks(comm, text):
        return loss
    rows = "the loss of its rows" if own is not None and not math.isfinite(float(own)) else ""
    return _of_ranks(comm, rows)


def _gradients(engine: ParallelEngine) -> list[tuple[str, Tensor]]:
    """By the names of whole parameters; where they are gone already, sums of their squares."""
    squares = getattr(engine.sharded, "squares", None)
    if squares is not None:
        return [(engine.saved_as(name), squares(name)) for name in engine.sharded.owned()]
    own = engine.sharded.owned() if engine.gathers else dict(engine.local.named_parameters())
    return [(name, local(p.grad)) for name, p in own.items() if p.grad is not None]


def _described(found: FiniteCheck, what: str) -> str:
    if not found.bad:
        return ""
    return f"{len(found.bad)} of {found.total} {what} ({_first(found.bad)})"


def _of_ranks(comm: Comm, reports: str) -> str:
    """What each rank has reported, equal reports together; empty if none reported anything."""
    groups: dict[str, list[int]] = {}
    for rank, one in zip(comm.ranks, CommPeers(comm).gather(reports.encode()), strict=True):
        if one:
            groups.setdefault(one.decode(), []).append(rank)
    lines = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {one}"
        for one, ranks in groups.items()
    ]
    more = len(lines) - _NAMED
    return "; ".join(lines[:_NAMED]) + (f"; and {more} more groups of ranks" if more > 0 else "")


def _first(names: Sequence[str]) -> str:
    more = "" if len(names) <= _NAMED else f" and {len(names) - _NAMED} more"
    return f"{', '.join(names[:_NAMED])}{more}"
