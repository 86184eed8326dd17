"""From one split to another while a run goes on: every rank sends what others need, no files.

A rank's weights and optimizer state are boxes of whole tensors, by name. All ranks send each
other which boxes they have and which they need; what two boxes have in common travels once, in
one message for each pair of ranks.

Source: Liu et al., Galvatron, 2025 (runtime adaptation without a checkpoint).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoal.core.boxes import Box, uncovered
from shoal.core.errors import RankError

if TYPE_CHECKING:
    from shoal.checkpoint.pieces import Piece
    from shoal.corpora.tokens import TokenSet
    from shoal.ir import TrainJob
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.parallel.engine import ParallelEngine
    from shoal.parallel.protocols import Comm
    from shoal.train.loop import RankTrainer
    from shoal.train.protocols import Updater

_TAG = "reshard"


class EmptyWeights:
    """Weights that hold nothing yet: what is moved in replaces all of it."""

    def __init__(self, config: ModelConfig) -> None:
        from shoal.model.initialise import empty

        self.config = config
        self._shapes = {name: tuple(p.shape) for name, p in empty(config).named_parameters()}

    def whole(self, name: str) -> Tensor:
        """Zeros of the shape of a parameter."""
        return torch.zeros(self._shapes[name])

    def model(self) -> Transformer:
        """The whole model, of zeros."""
        from shoal.model.initialise import empty

        model = empty(self.config).to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return model


class _Need(NamedTuple):
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class ReshardedState:
    """What :meth:`~shoal.train.loop.RankTrainer.load` reads, as it does a checkpoint.

    The first read only records the requests; after :func:`move` has transferred them, reads return
    the tensors.

    Args:
        shapes: name -> whole shape of everything that there is.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.needs: dict[_Need, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self.ready = False

    def names(self) -> list[str]:
        """Everything that there is."""
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape."""
        return self._shapes[name]

    def set_dtypes(self, dtypes: Mapping[str, str]) -> None:
        """What the elements are."""
        self._dtypes = {name: getattr(torch, dtype) for name, dtype in dtypes.items()}

    def tensor(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """A box of a tensor; all of it if no box is given."""
        whole = self._shapes[name]
        need = _Need(
            name, tuple(offset or (0,) * len(whole)), tuple(whole if shape is None else shape)
        )
        if need not in self.needs:
            self.needs[need] = torch.zeros(need.shape, dtype=self._dtypes[name])
        return self.needs[need].clone() if need.shape == () else self.needs[need]


def gather_json(comm: Comm, value: object) -> list[Any]:
    """What every rank gave, by rank; plain JSON."""
    data = json.dumps(value).encode()
    length = torch.tensor([len(data)], dtype=torch.int64, device=comm.device)
    comm.all_reduce(length, tag=_TAG, op="max").wait()
    most = int(length)
    mine = torch.frombuffer(bytearray(data.ljust(most)), dtype=torch.uint8).to(comm.device)
    every = mine.new_empty(comm.world * most)
    comm.all_gather(every, mine, tag=_TAG).wait()
    whole = bytes(every.cpu().numpy())
    return [json.loads(whole[at * most : (at + 1) * most]) for at in range(comm.world)]


def move(comm: Comm, have: Mapping[str, Sequence[Piece]], moved: ReshardedState) -> int:
    """Bring every rank what it needs from those that have it; all ranks call it.

    Args:
        comm: all ranks.
        have: this rank's boxes; all ranks together hold every element once.
        moved: filled with what this rank needs.

    Returns:
        Bytes that this rank sent.

    Raises:
        RankError: no rank has an element that this rank needs.
    """
    names = sorted(have)
    every = gather_json(
        comm,
        {
            "have": [[n, [[list(p.offset), list(p.tensor.shape)] for p in have[n]]] for n in names],
            "need": [[n.name, list(n.offset), list(n.shape)] for n in moved.needs],
        },
    )
    owned = [
        [(name, Box(tuple(o), tuple(s))) for name, boxes in rank["have"] for o, s in boxes]
        for rank in every
    ]
    needed = [[(name, Box(tuple(o), tuple(s))) for name, o, s in rank["need"]] for rank in every]
    _check(owned, needed[comm.rank])
    parts = {name: [(p.box, p.tensor) for p in have[name]] for name in names}
    incoming: list[tuple[int, Tensor, Any]] = []
    for source in range(comm.world):
        if source == comm.rank:
            continue
        size = sum(
            box.volume * _width(moved.tensor(name, offset=need.offset, shape=need.shape))
            for name, need, box in _common(owned[source], needed[comm.rank])
        )
        if size:
            buffer = torch.empty(size, dtype=torch.uint8, device=comm.device)
            incoming.append((source, buffer, comm.receive(buffer, source, tag=_TAG)))
    sends, sent = [], 0
    for target in range(comm.world):
        if target == comm.rank:
            continue
        pieces = [
            _bytes(parts[name], box) for name, _, box in _common(owned[comm.rank], needed[target])
        ]
        if pieces:
            message = torch.cat(pieces).to(comm.device)
            sent += message.numel()
            sends.append(comm.send(message, target, tag=_TAG))
    for name, need, box in _common(owned[comm.rank], needed[comm.rank]):
        _put(moved, name, need, box, _bytes(parts[name], box))
    for source, buffer, pending in incoming:
        pending.wait()
        at = 0
        for name, need, box in _common(owned[source], needed[comm.rank]):
            size = box.volume * _width(moved.tensor(name, offset=need.offset, shape=need.shape))
            _put(moved, name, need, box, buffer[at : at + size].cpu())
            at += size
    for send in sends:
        send.wait()
    moved.ready = True
    return sent


def _common(
    owned: Sequence[tuple[str, Box]], needed: Sequence[tuple[str, Box]]
) -> list[tuple[str, Box, Box]]:
    """(name, needed box, what an owned box has of it), in an order that both ends know."""
    boxes: dict[str, list[Box]] = {}
    for name, box in owned:
        boxes.setdefault(name, []).append(box)
    results = []
    for name, need in needed:
        for box in boxes.get(name, ()):
            common = need.intersect(box)
            if common is not None:
                results.append((name, need, common))
    return results


def _check(owned: Sequence[Sequence[tuple[str, Box]]], needed: Sequence[tuple[str, Box]]) -> None:
    boxes: dict[str, list[Box]] = {}
    for rank in owned:
        for name, box in rank:
            boxes.setdefault(name, []).append(box)
    for name, need in needed:
        left = uncovered(need, boxes.get(name, ())) if need.shape else []
        if left or name not in boxes:
            raise RankError(
                f"resharding: no rank has {name} {left[0] if left else ''}, which this rank needs; "
                "continue from the last checkpoint with --resume"
            )


def _width(tensor: Tensor) -> int:
    return tensor.element_size()


def _bytes(parts: Sequence[tuple[Box, Tensor]], box: Box) -> Tensor:
    """The elements of ``box`` as bytes, from the part that has them."""
    for own, tensor in parts:
        common = own.intersect(box)
        if common == box:
            piece = tensor.detach()[box.slices(own)] if box.shape else tensor.detach()
            return piece.contiguous().reshape(-1).view(torch.uint8).cpu()
    raise RankError(f"resharding: {box} is in no part of this rank")


def _put(moved: ReshardedState, name: str, need: Box, box: Box, data: Tensor) -> None:
    whole = moved.needs[_Need(name, need.offset, need.shape)]
    # A copy of its own, which begins where an element may begin.
    values = data.clone().view(whole.dtype).view(box.shape)
    if box.shape:
        whole[box.slices(need)] = values
    else:
        whole.copy_(values)


def switch(
    trainer: RankTrainer, job: TrainJob, tokens: TokenSet, comm: TorchComm, *, close: bool = True
) -> tuple[RankTrainer, int]:
    """Another trainer for ``job`` that goes on where this one is; all ranks call it.

    Args:
        trainer: the one that trains; it is closed.
        job: the same job with another parallelism.
        tokens: the corpus.
        comm: all ranks.
        close: end the old trainer.

    Returns:
        The new trainer, and the bytes that this rank sent.

    Raises:
        PlanError: the new split cannot run; the old trainer goes on.
    """
    from shoal.train.loop import RankTrainer

    new = RankTrainer(
        job,
        trainer.total_steps,
        EmptyWeights(trainer.engine.config),
        tokens,
        comm,
        device=trainer.device,
    )
    sent = _carry(comm, trainer.pieces(), new.load)
    if close:
        trainer.close()
    return new, sent


def switch_engine(
    engine: ParallelEngine, updater: Updater, job: TrainJob, comm: Comm
) -> tuple[ParallelEngine, Updater, int]:
    """The same of an engine and its optimizer, without data; all ranks call it.

    Args:
        engine: the one that trains.
        updater: its optimizer.
        job: the same job with another parallelism.
        comm: all ranks.

    Returns:
        The new engine and optimizer, and the bytes that this rank sent.

    Raises:
        PlanError: the new split cannot run.
    """
    from shoal.core.parts import table
    from shoal.parallel.engine import ParallelEngine
    from shoal.parallel.legal import check_split
    from shoal.train.state import fill, pieces_of

    schedule = check_split(job, engine.config.shape())
    new = ParallelEngine(
        job, schedule, EmptyWeights(engine.config), comm, device=engine.device, dtype=engine.dtype
    )
    fresh: Updater = table("optimizer").build(job.optimizer).build(new.sharded.owned())

    def load(saved: ReshardedState) -> None:
        fill(new, fresh, saved)

    sent = _carry(comm, pieces_of(engine, updater), load)
    return new, fresh, sent


def _carry(
    comm: Comm, have: Mapping[str, Sequence[Piece]], load: Callable[[ReshardedState], object]
) -> int:
    """Move what the ranks have to where ``load`` asks for it; bytes that this rank sent."""
    given = {name: pieces for name, pieces in have.items() if pieces}
    mine = {
        name: (list(pieces[0].global_shape), str(pieces[0].tensor.dtype).removeprefix("torch."))
        for name, pieces in given.items()
    }
    known: dict[str, Any] = {}
    for rank in gather_json(comm, mine):
        known |= rank
    moved = ReshardedState({name: shape for name, (shape, _) in known.items()})
    moved.set_dtypes({name: dtype for name, (_, dtype) in known.items()})
    load(moved)  # the first time it only says what it needs
    sent = move(comm, given, moved)
    load(moved)
    return sent
