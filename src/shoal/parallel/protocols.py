"""What the sharding, the context-parallel and the synchronising parts promise.

A rank's communicators by axis are its :class:`Ranks`. All of them are made at start by all ranks
in the same order. A sharding part's ``apply`` wraps a model and returns a
:class:`~shoal.ir.comm.ShardedModel`, which the loop drives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from shoal.ir import Estimate, Machine, Work
from shoal.ir.comm import Comm, LocalParameter, Pending, ShardedModel, Updater
from shoal.ir.hooks import StepHook

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.ir.mask import Mask

__all__ = [
    "Comm",
    "ContextPart",
    "ExpertRanks",
    "LocalParameter",
    "MicroBatch",
    "Nodes",
    "Pending",
    "Ranks",
    "Shard",
    "ShardedModel",
    "SyncPart",
    "Updater",
]


class Nodes(NamedTuple):
    """The ranks that share out experts, by the nodes on which they stand.

    Args:
        dispatch: 1dh or 2dh: all-to-all algorithm between nodes.
        near: those on the node of this rank.
        far: those with the place of this rank, one of each node.
    """

    dispatch: str
    near: Comm
    far: Comm


class ExpertRanks(NamedTuple):
    """The communicators of one rank in the grid of the experts.

    Args:
        ep: ranks that share out the experts.
        etp: ranks with slices of the same experts.
        edp: ranks that hold the same slices of the same experts.
        model: ranks that hold one copy of all experts: pp x ep x etp.
        nodes: the ranks of ep by node for a hierarchical all-to-all; None for a direct one.
    """

    ep: Comm
    etp: Comm
    edp: Comm
    model: Comm
    nodes: Nodes | None = None


class Ranks(NamedTuple):
    """The communicators of one rank.

    Args:
        world: all ranks.
        tp: tensor-parallel peers.
        cp: context-parallel peers.
        pp: the ranks of this pipeline, first stage first.
        data: ranks that hold the same parameters and sum their gradients: dp x cp, of one worker.
        model: ranks that hold one copy of the model: pp x tp.
        experts: the grid of the experts, if it differs.
        outer: ranks with the same place in all workers; None where all are one worker.
        worker: ranks that make one update together; None where all do.
    """

    world: Comm
    tp: Comm
    cp: Comm
    pp: Comm
    data: Comm
    model: Comm
    experts: ExpertRanks | None = None
    outer: Comm | None = None
    worker: Comm | None = None

    @property
    def peers(self) -> Comm:
        """The ranks that make an update together."""
        return self.worker or self.world

    @property
    def prefix(self) -> str:
        """Before the names of what workers with rounds save of their optimizers: all but one."""
        return f"worker{self.outer.rank}." if self.outer is not None and self.outer.rank else ""


class MicroBatch(NamedTuple):
    """What the stages of one rank need to know of a micro-batch of b sequences.

    Args:
        tokens: input ids int64 [b, T / cp], this context-parallel rank's positions.
        targets: next tokens int64 [b, T / cp]; -100 counts nothing.
        positions: int64 [T / cp], positions in the sequence.
        documents: int32 [b, T] of the whole sequence, or None.
        row: number of the first sequence in the global batch.
        step: global step.
        weights: how much the tokens of each sequence count [b]; 1 if not given.
        mix: attention, where the micro-batch brings its own: q [b, H, n, d], k and v [b, K, n, d]
            to [b, H, n, d].
        numbers: of each token in the global batch int64 [n], where they do not follow from its
            row and its place; with ``mix``.
        length: tokens of a row of the global batch T; with ``mix``.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None
    row: int
    step: int
    weights: Tensor | None = None
    mix: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    numbers: Tensor | None = None
    length: int | None = None


class ContextPart(Protocol):
    """A part of kind ``context``: attention over sequences that ``cp`` ranks share."""

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        """Refuse heads of one rank that ``world`` ranks cannot work with.

        Raises:
            ConfigError: names the number and those that would do.
        """

    def positions(self, length: int, world: int) -> list[np.ndarray]:
        """Positions int64 [length / world] of each rank.

        Raises:
            ConfigError: a length that the ranks cannot share; names those that they could.
        """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Mask], comm: Comm) -> Tensor:
        """Softmax attention of this rank's queries over every rank's keys; has a gradient.

        Args:
            q: [B, H, T / world, d], at this rank's positions.
            k: [B, K, T / world, d].
            v: [B, K, T / world, d].
            masks: of the whole sequences [T, T]; one for all rows, or one a row.
            comm: the context-parallel ranks.

        Returns:
            [B, H, T / world, d]; zero where nothing is seen.
        """

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes a rank sends for the attention of one step, and the seconds not hidden."""


class Shard(Protocol):
    """A part of kind ``shard``."""

    divides: ClassVar[frozenset[str]]
    """What a rank holds only its share of: weights, gradients, optimizer."""

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """With which options it is worth trying for the split of a job.

        A part that offers nothing leaves it out: a planner then never proposes it.
        """

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes a rank sends in one step, and the seconds they take."""

    def apply(self, model: nn.Module, comm: Comm, *, whole_matrices: bool) -> ShardedModel:
        """Wrap ``model``; ``whole_matrices`` says that the optimizer needs them unsplit.

        Raises:
            ConfigError: this sharding splits matrices and the optimizer needs them whole.
        """


class SyncPart(Protocol):
    """A part of kind ``sync``."""

    def workers(self, dp: int) -> int | None:
        """How many workers ``dp`` data-parallel ranks are; None where they make one update.

        Raises:
            ConfigError: they cannot be shared out evenly.
        """

    def steps(self, work: Work, machine: Machine) -> int | None:
        """Steps of a round; None without rounds."""

    def kept_bytes(self, work: Work) -> float:
        """Bytes that a rank keeps for it."""

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes a rank sends to other workers in one step, and the seconds not hidden."""

    def apply(self, model: nn.Module, owned: Mapping[str, Tensor], ranks: Ranks) -> StepHook | None:
        """Begin the first round of parameters ``owned`` between the workers; None without rounds.

        Raises:
            ConfigError: the model has a state that workers would not share.
        """
