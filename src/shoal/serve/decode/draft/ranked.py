"""Passes of a draft whose layers are on several ranks: what each of them does.

All ranks compute the same rows, each by what it has. A recorded pass is several recordings, one
from each place where ranks meet to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.ir import MAX_NODES, ServeJob
from shoal.kernel.tape import Tape, record
from shoal.model.transformer import Transformer
from shoal.parallel.protocols import Comm
from shoal.parallel.tensor.layer import LayerRanks, Program, Share, TensorExchange, cut, meet
from shoal.plan.trees.fuzzy import Groups
from shoal.serve.decode.captured import Recording, Recordings
from shoal.serve.decode.draft.files import draft_net
from shoal.serve.decode.draft.net import DraftNet


def part_of(
    path: str,
    job: ServeJob,
    limit: int,
    dtype: torch.dtype,
    rank: int,
    world: int,
    share: Share = "layers",
) -> DraftNet:
    """What one rank has of a draft: its layers, and a cache of their keys and values.

    Raises:
        ModelError: ranks cannot share it.
    """
    return draft_net(
        path, job, limit, dtype, torch.device("cpu"), lambda one: cut(one, rank, world, share)
    )


def ranked(
    part: DraftNet,
    comm: Comm,
    limit: int,
    share: Share = "layers",
    groups: Groups | None = None,
    *,
    full: bool = False,
) -> DraftNet:
    """Passes of a draft by ranks, each with its part.

    Args:
        part: of this rank, see :func:`part_of`.
        comm: the ranks.
        limit: most tokens of a request.
        share: as it was cut.
        groups: of layers that read the same input; none if not given.
        full: feed-forward layers of a group do so, too.
    """
    own = part.model
    assert isinstance(own, Transformer)
    model = LayerRanks(own, comm, share, groups, full=full)
    recorded = None
    if part.attention is not None and part.cache.device.type == "cpu":
        recorded = RankedRecordings(model, part.cache, part.attention, limit + MAX_NODES + 1)
    return DraftNet(
        model,
        part.cache,
        nbytes=part.nbytes,
        attention=part.attention,
        prompts=part.prompts,
        recorded=recorded,
    )


class _Piece(NamedTuple):
    """A recording, and what ranks exchange behind it; nothing behind the last."""

    tape: Tape
    then: TensorExchange | None


class _Pieces:
    """A recorded pass of one rank."""

    def __init__(self, pieces: list[_Piece], result: Tensor, comm: Comm) -> None:
        self._pieces, self.result, self._comm = pieces, result, comm

    def play(self) -> bool:
        """See :class:`~shoal.kernel.tape.RecordedPass`; on all ranks together.

        Raises:
            RankError: another rank is gone.
        """
        fine = True
        for tape, then in self._pieces:
            # The others go on, and wait for this one: what it says of its inputs comes at the end.
            fine &= tape.play()
            if then is not None:
                meet(self._comm, then)
        return fine


class RankedRecordings(Recordings):
    """Recorded passes of :class:`~shoal.parallel.tensor.layer.LayerRanks`."""

    def _record(self, key: tuple[int, int], recording: Recording) -> Tensor:
        """See :class:`~shoal.serve.decode.captured.Recordings`."""
        model = self._model
        assert isinstance(model, LayerRanks)
        mixer = self.mixer(recording, key[0] == key[1])
        steps = model.whole(recording.x_ND, recording.fed[1], mixer)
        pieces: list[_Piece] = []
        reason = ""
        while True:
            results: list[TensorExchange | tuple[Tensor, Tensor]] = []
            _, tape = record(_step(steps, results))
            then = results[0] if isinstance(results[0], TensorExchange) else None
            if isinstance(tape, str):
                reason = reason or tape
            else:
                pieces.append(_Piece(tape, then))
            if then is None:
                break
            meet(model.comm, then)
        last = results[0]
        assert not isinstance(last, TensorExchange)
        hidden, result = last
        recording.hidden = hidden
        if not self._all(not reason):
            self.reasons[key] = reason or "a kernel of another rank"
            return result
        computed = result.clone()
        self._embed(recording)
        played = _Pieces(pieces, result, model.comm)
        if self._all(played.play() and torch.equal(result, computed)):
            recording.tape = played
        else:
            self.reasons[key] = "a kernel that is not seen"
        return computed

    def _all(self, mine: bool) -> bool:
        """Whether it is so on every rank: either all play what they recorded, or none does."""
        model = self._model
        assert isinstance(model, LayerRanks)
        others = torch.tensor([float(not mine)])
        model.comm.all_reduce(others, tag="recorded").wait()
        return not others.item()


def _step(
    steps: Program, found: list[TensorExchange | tuple[Tensor, Tensor]]
) -> Callable[[], Tensor]:
    """The next part of a pass, which puts what it stopped for into ``found``."""

    def compute() -> Tensor:
        try:
            one: TensorExchange | tuple[Tensor, Tensor] = next(steps)
        except StopIteration as end:
            one = end.value
        found.append(one)
        return one.parts[0] if isinstance(one, TensorExchange) else one[1]

    return compute
