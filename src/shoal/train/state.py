"""What a rank holds of a run's state, and how it is filled with what is stored.

Weights are named ``model.NAME``, and what an optimizer keeps of them ``optimizer.NAME.KEY``,
whatever split the run has; every tensor lies in pieces that say where in the whole they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from shoal.checkpoint.loading import LoadReport, load_pieces
from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.saved_checkpoint import SavedCheckpoint
from shoal.kernel.tensors import local
from shoal.parallel.protocols import LocalParameter

if TYPE_CHECKING:
    from shoal.ir.comm import Comm
    from shoal.ir.hooks import TensorSource
    from shoal.parallel.engine import ParallelEngine
    from shoal.train.protocols import Updater


def pieces_of(engine: ParallelEngine, updater: Updater) -> dict[str, list[Piece]]:
    """What a rank holds and writes of weights and optimizer state, by name."""
    return _held(engine, updater, engine.writes)


def held_by(engine: ParallelEngine, updater: Updater) -> dict[str, list[Piece]]:
    """All that a rank holds of them, even if others do too: nothing is copied."""
    return _held(engine, updater, lambda name: True)


def _held(
    engine: ParallelEngine, updater: Updater, wanted: Callable[[str], bool]
) -> dict[str, list[Piece]]:
    """By name; what an update changes together lies together, in the order of the weights."""
    result: dict[str, list[Piece]] = {}
    for name, boxes in engine.held().items():
        if wanted(name):
            result[f"model.{name}"] = _pieces(boxes)
    # All states of a kind at once: what the engine holds is asked for once and not for each.
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for name, entries in updater.state().items():
        if not wanted(name):
            continue
        for key, value in entries.items():
            if value.dim():
                kinds.setdefault(key, {})[name] = value
            else:
                result[_state_as(engine, name, key)] = _pieces([LocalParameter(value, (), ())])
    for key, tensors in kinds.items():
        for name, boxes in engine.boxes(tensors).items():
            result.setdefault(_state_as(engine, name, key), []).extend(_pieces(boxes))
    order = {name: number for number, name in enumerate(engine.held())}
    return dict(sorted(result.items(), key=lambda item: order.get(_weight_of(item[0]), len(order))))


def _weight_of(saved: str) -> str:
    """The weight that a saved tensor is, or is the state of."""
    if saved.startswith("model."):
        return saved.removeprefix("model.")
    return saved.partition("optimizer.")[2].rpartition(".")[0]


def _state_as(engine: ParallelEngine, name: str, key: str) -> str:
    """What the optimizer's state of a parameter is saved as; workers with rounds have their own."""
    return f"{engine.ranks.prefix}optimizer.{engine.saved_as(name)}.{key}"


def saved_names(
    engine: ParallelEngine, state: Mapping[str, Mapping[str, torch.Tensor]], names: Iterable[str]
) -> list[str]:
    """The names under which parameters, and what an optimizer keeps of them, are saved."""
    saved_names = []
    for name in names:
        states = (_state_as(engine, name, key) for key in state.get(name, {}))
        saved_names += [f"model.{engine.saved_as(name)}", *states]
    return saved_names


@torch.no_grad()
def fill(
    engine: ParallelEngine,
    updater: Updater,
    saved: TensorSource,
    comm: Comm | None = None,
) -> LoadReport | None:
    """Load weights and optimizer state of a rank, saved with any parallelism.

    Args:
        engine: whose weights are filled.
        updater: its optimizer.
        saved: where everything is read from.
        comm: ranks that fill theirs from the same checkpoint now; they share the reading.

    Returns:
        What it has cost, where it was a checkpoint of our own.
    """
    # Our own checkpoints are read for all ranks at once; others box by box.
    own = getattr(saved, "saved", saved)
    checkpoint = own if isinstance(own, SavedCheckpoint) else None
    wanted: dict[str, list[Piece]] = {}
    for name, boxes in engine.held().items():
        wanted.setdefault(f"model.{name}", []).extend(_pieces(boxes))
    keys: dict[str, list[str]] = {}
    prefix = f"{engine.ranks.prefix}optimizer."
    for entry in saved.names():
        if entry.startswith(prefix):
            name, _, key = entry.removeprefix(prefix).rpartition(".")
            keys.setdefault(name, []).append(key)
    state: dict[str, Mapping[str, torch.Tensor]] = {}
    # What the optimizer holds already is filled where it lies.
    held = updater.state()
    for name, parameter in engine.sharded.owned().items():
        entries: dict[str, torch.Tensor] = {}
        for key in keys.get(engine.saved_as(name), []):
            stored = _state_as(engine, name, key)
            if saved.shape(stored) != ():
                there = held.get(name, {}).get(key)
                entries[key] = torch.zeros_like(local(parameter)) if there is None else there
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


def _pieces(boxes: list[LocalParameter]) -> list[Piece]:
    return [Piece(box.tensor, box.shape, box.offset) for box in boxes]
