"""The update of parameters whose state lies in slow tiers, some of them at a time.

A sub-group is at most so many elements of one parameter. Weight, gradient and state of one are
read while the one before is updated and the one before that is written, through three staging
buffers that are made once.

Source: Rajbhandari et al., ZeRO-Infinity, 2021, section 5.2.2 (infinity offload engine).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from shoal.core.errors import CheckpointError, ConfigError
from shoal.memory.tiers.places import chunks

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.memory.tiers.mover import Ticket
    from shoal.memory.tiers.offloaded_parameter import OffloadedParameter
    from shoal.memory.tiers.places import StagingRing, TierRow, Tiers


class ElementwiseOptimizer(Protocol):
    """An optimizer that updates every element by itself."""

    states: ClassVar[tuple[str, ...]]
    """Names of what it keeps of every element."""

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        states: Mapping[str, Tensor],
        *,
        step: int,
        factor: float,
        matrix: bool,
    ) -> None:
        """Update elements in place; the bits of an element do not depend on the others.

        Args:
            weight: the elements, flat.
            gradient: of them.
            states: what is kept of them.
            step: updates made before this one.
            factor: scales the learning rate.
            matrix: they are elements of a matrix.
        """


def elementwise(optimizer: object, where: str) -> ElementwiseOptimizer:
    """The optimizer, if it updates every element by itself.

    Raises:
        ConfigError: its update looks at several elements.
    """
    if hasattr(optimizer, "states") and hasattr(optimizer, "update"):
        return cast("ElementwiseOptimizer", optimizer)
    raise ConfigError(
        f"{where}: {type(optimizer).__name__} looks at several elements of a parameter in its "
        "update, and parameters are updated in pieces; use optimizer: adamw"
    )


@dataclass
class _Piece:
    home: OffloadedParameter
    first: int
    count: int
    slot: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ticket: Ticket | None = None


class SubGroups:
    """See :class:`~shoal.train.protocols.Updater`.

    Args:
        numel: most elements of a sub-group, a multiple of 2**14.
        ring: staging buffers, each for weight, gradient and state of a sub-group.
    """

    def __init__(
        self,
        homes: Sequence[OffloadedParameter],
        optimizer: ElementwiseOptimizer,
        tiers: Tiers,
        numel: int,
        ring: StagingRing,
    ) -> None:
        self.homes = [home for home in homes if home.gradient is not None and home.cut.numel]
        self._optimizer, self._tiers = optimizer, tiers
        self._numel, self._ring = numel, ring
        self.scales: list[Tensor] = []
        """What gradients are multiplied by before they are used."""

    def pieces_of(self, home: OffloadedParameter) -> Iterator[tuple[int, int]]:
        """First element and number of elements of a parameter's sub-groups."""
        return chunks(home.cut.numel, self._numel)

    def _pieces(self) -> Iterator[_Piece]:
        for home in self.homes:
            for first, count in self.pieces_of(home):
                yield _Piece(home, first, count)

    def step(self, factor: float) -> None:
        """Update every parameter once; ``factor`` scales the learning rate."""
        reading: deque[_Piece] = deque()
        writing: deque[Ticket] = deque()
        pieces = self._pieces()
        while True:
            while len(reading) < 2 and (piece := next(pieces, None)) is not None:
                load = functools.partial(self._load, piece)
                piece.ticket = self._tiers.read.submit(load, _on_disk(piece, self._read(piece)))
                reading.append(piece)
            if not reading:
                break
            piece = reading.popleft()
            assert piece.ticket is not None
            piece.ticket.wait()
            self._update(piece, factor)
            store = functools.partial(self._store, piece)
            nbytes = _on_disk(piece, [piece.home.weight, *piece.home.states.values()])
            writing.append(self._tiers.write.submit(store, nbytes))
            while writing and writing[0].done():
                writing.popleft().wait()
        for ticket in writing:
            ticket.wait()
        for home in self.homes:
            home.steps += 1
            home.fresh = True
        self.scales.clear()

    @staticmethod
    def _read(piece: _Piece) -> list[TierRow]:
        """What an update reads; there is nothing of a gradient that has not come."""
        home = piece.home
        gradient = [] if home.fresh or home.gradient is None else [home.gradient]
        return [home.weight, *gradient, *home.states.values()]

    def _load(self, piece: _Piece) -> None:
        home, first, count = piece.home, piece.first, piece.count
        rows = {"weight": home.weight, "gradient": home.gradient, **home.states}
        slot = self._ring.get()
        piece.slot = slot
        try:
            share = slot.numel() // len(rows)
            for at, (name, row) in enumerate(rows.items()):
                assert row is not None
                part = slot[at * share : (at + 1) * share]
                if name == "gradient" and home.fresh:
                    piece.tensors[name] = part[: count * home.dtype.itemsize].view(home.dtype)
                    piece.tensors[name].zero_()
                else:
                    piece.tensors[name] = row.take(first, count, part)
        except BaseException:
            self._ring.put(slot)
            raise

    def _update(self, piece: _Piece, factor: float) -> None:
        home, tensors = piece.home, piece.tensors
        for scale in self.scales:
            tensors["gradient"].mul_(scale)
        self._optimizer.update(
            tensors["weight"],
            tensors["gradient"],
            {name: tensors[name] for name in home.states},
            step=home.steps,
            factor=factor,
            matrix=len(home.cut.shape) >= 2,
        )

    def _store(self, piece: _Piece) -> None:
        home, slot = piece.home, piece.slot
        assert slot is not None
        rows = {"weight": home.weight, "gradient": None, **home.states}
        try:
            share = slot.numel() // len(rows)
            for at, (name, row) in enumerate(rows.items()):
                if row is not None:
                    row.give(piece.first, piece.tensors[name], slot[at * share :])
        finally:
            self._ring.put(slot)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Parameter name -> state name -> tensor, as :class:`torch.optim` names them."""
        import torch

        state: dict[str, dict[str, Tensor]] = {}
        for home in self.homes:
            entries = {n: home.cut.held(row.shown()).tensor for n, row in home.states.items()}
            state[home.name] = {"step": torch.tensor(float(home.steps)), **entries}
        return state

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over a state with the same names and shapes."""
        for home in self.homes:
            if home.name not in state:
                raise CheckpointError(
                    f"the checkpoint has no optimizer state of {home.name}; it was saved with "
                    "another optimizer; resume with that one"
                )
            entries = state[home.name]
            home.steps = int(entries["step"])
            for name, row in home.states.items():
                row.shown().copy_(entries[name].reshape(-1))
        if self._tiers.disk is not None:
            self._tiers.disk.flush()


def _on_disk(piece: _Piece, rows: Sequence[TierRow]) -> int:
    """Bytes of a sub-group that travel: those of its rows that lie on a disk."""
    return piece.count * piece.home.dtype.itemsize * sum(row.on_disk for row in rows)
