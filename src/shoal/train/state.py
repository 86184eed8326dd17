"""What a rank holds of a run's state, and how it is filled with what is stored.

Weights are named ``model.NAME``, and what an optimizer keeps of them ``optimizer.NAME.KEY``,
whatever split the run has; every tensor lies in pieces that say where in the whole they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from shoal.checkpoint.loading import LoadReport, load_pieces
from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.saved import Saved
from shoal.parallel.protocols import Held

if TYPE_CHECKING:
    from shoal.ir.comm import Comm
    from shoal.parallel.engine import Engine
    from shoal.train.protocols import Updater

__all__ = ["Stored", "fill", "held_by", "pieces_of"]


class Stored(Protocol):
    """Where tensors are read from, box by box: a checkpoint, or other ranks."""

    def names(self) -> Collection[str]:
        """Every tensor's name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        ...

    def tensor(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A box of a tensor; all of it if no box is given."""
        ...


def pieces_of(engine: Engine, updater: Updater) -> dict[str, list[Piece]]:
    """What a rank holds and writes of weights and optimizer state, by name."""
    return _held(engine, updater, engine.writes)


def held_by(engine: Engine, updater: Updater) -> dict[str, list[Piece]]:
    """All that a rank holds of them, whoever else does: nothing is copied."""
    return _held(engine, updater, lambda name: True)


def _held(
    engine: Engine, updater: Updater, wanted: Callable[[str], bool]
) -> dict[str, list[Piece]]:
    """By name; what an update changes together lies together, in the order of the weights."""
    found: dict[str, list[Piece]] = {}
    for name, boxes in engine.held().items():
        if wanted(name):
            found[f"model.{name}"] = _pieces(boxes)
    # All states of a kind at once: what the engine holds is asked for once and not for each.
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for name, entries in updater.state().items():
        if not wanted(name):
            continue
        for key, value in entries.items():
            if value.dim():
                kinds.setdefault(key, {})[name] = value
            else:
                saved = f"optimizer.{engine.saved_as(name)}.{key}"
                found[saved] = _pieces([Held(value, (), ())])
    for key, tensors in kinds.items():
        for name, boxes in engine.boxes(tensors).items():
            found.setdefault(f"optimizer.{engine.saved_as(name)}.{key}", []).extend(_pieces(boxes))
    order = {name: number for number, name in enumerate(engine.held())}
    return dict(sorted(found.items(), key=lambda item: order.get(_weight_of(item[0]), len(order))))


def _weight_of(saved: str) -> str:
    """The weight that a saved tensor is, or is the state of."""
    if saved.startswith("model."):
        return saved.removeprefix("model.")
    return saved.removeprefix("optimizer.").rpartition(".")[0]


@torch.no_grad()
def fill(
    engine: Engine,
    updater: Updater,
    saved: Stored,
    comm: Comm | None = None,
    *,
    prefix: str = "",
) -> LoadReport | None:
    """Fill weights and optimizer state of a rank with what is stored, whatever split stored it.

    Args:
        engine: whose weights are filled.
        updater: its optimizer.
        saved: where everything is read from.
        comm: ranks that fill theirs from the same checkpoint now; they share the reading.
        prefix: before the names of the optimizer state of this rank's worker.

    Returns:
        What it has cost, where it was a checkpoint of our own.
    """
    # Our own checkpoints are read for all ranks at once; others box by box.
    own = getattr(saved, "saved", saved)
    checkpoint = own if isinstance(own, Saved) else None
    wanted: dict[str, list[Piece]] = {}
    for name, boxes in engine.held().items():
        wanted.setdefault(f"model.{name}", []).extend(_pieces(boxes))
    keys: dict[str, list[str]] = {}
    for entry in saved.names():
        if entry.startswith(f"{prefix}optimizer."):
            name, _, key = entry.removeprefix(f"{prefix}optimizer.").rpartition(".")
            keys.setdefault(name, []).append(key)
    state: dict[str, Mapping[str, torch.Tensor]] = {}
    # What the optimizer holds already is filled where it lies.
    held = updater.state()
    for name, parameter in engine.sharded.owned().items():
        entries: dict[str, torch.Tensor] = {}
        for key in keys.get(engine.saved_as(name), []):
            stored = f"{prefix}optimizer.{engine.saved_as(name)}.{key}"
            if saved.shape(stored) != ():
                like = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                there = held.get(name, {}).get(key)
                entries[key] = torch.zeros_like(like) if there is None else there
                boxes = engine.boxes({name: entries[key]})[name]
                wanted.setdefault(stored, []).extend(_pieces(boxes))
            elif checkpoint is None:
                entries[key] = saved.tensor(stored)
            else:
                entries[key] = checkpoint.blank(stored)
                wanted.setdefault(stored, []).append(Piece.whole(entries[key]))
        if entries:
            state[name] = entries
    report = None
    if checkpoint is not None:
        report = load_pieces(checkpoint, wanted, comm, cast=True)
    else:
        for name, pieces in wanted.items():
            for piece in pieces:
                shape = tuple(piece.tensor.shape)
                piece.tensor.copy_(saved.tensor(name, offset=piece.offset, shape=shape))
    updater.load(state)
    return report


def _pieces(boxes: list[Held]) -> list[Piece]:
    return [Piece(box.tensor, box.shape, box.offset) for box in boxes]
