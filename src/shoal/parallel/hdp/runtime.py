"""A rank's micro-steps of one batch, by a plan that all ranks have agreed on.

Every rank has the whole batch's token ids; the first one makes the plan, or is given it, and sends
it to all. A rank then goes forward and backward through the micro-steps that name it, in the order
of the plan. Since that is one order for all ranks, those of a group always come to their common
micro-step with nothing between them and it that waits for another of them: no circle can close.
Gradients are summed once, over all ranks, when all are through; ranks may have different numbers
of micro-steps, or none.

Source: Ge et al., ByteScale, 2025, section 4; Wang et al., FlexSP, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.cost.training.sequences import Exchange, SequenceCost
from shoal.ir.hooks import StepHook
from shoal.parallel.hdp.attention import mix_of
from shoal.parallel.hdp.offload import HostShare
from shoal.parallel.hdp.slices import SequenceSegment, segments, shares
from shoal.parallel.protocols import Comm, MicroBatch
from shoal.plan.balance.sequences.assignment import Assignment, MicroStep, SequenceAssigner
from shoal.plan.balance.sequences.predicted import predict

if TYPE_CHECKING:
    from shoal.parallel.pipeline.runtime import Span, StageLike
    from shoal.parallel.tensor.rows import ReplicaSequences

_EXCHANGES: tuple[Exchange, ...] = ("ring", "ulysses")
# Shares travel as whole numbers.
_WHOLE = 10**9


class HybridRuntime(StepHook):
    """Makes and executes plans on one rank, in the place of a schedule's passes.

    Args:
        assigner: deals the sequences out.
        cost: that it goes by.
        world: all ranks.
        stage: the whole model as its only stage.
        around: called with whether the pass is the rank's last; wraps a backward pass.
        autocast: a fresh context in which forward passes compute.
        recompute: keep only the inputs of blocks.
        host: takes the share of a pass that the plan sends there; None where it sends nothing.
        span: as the pipeline runtime's.

    Attributes:
        plan: of the last step.
    """

    kind = "sequences"

    def __init__(
        self,
        assigner: SequenceAssigner,
        cost: SequenceCost,
        world: Comm,
        stage: StageLike,
        *,
        around: Callable[[bool], AbstractContextManager[None]],
        autocast: Callable[[], AbstractContextManager[object]],
        recompute: bool = False,
        host: HostShare | None = None,
        span: Span = nullcontext,
    ) -> None:
        self.assigner, self.cost, self.world, self.stage = assigner, cost, world, stage
        self.around, self.autocast, self.recompute = around, autocast, recompute
        self.host = host
        self.span = span
        self.plan: Assignment | None = None

    def close(self) -> None:
        """End what copies to the host."""
        if self.host is not None:
            self.host.close()

    def planned(self, rows: ReplicaSequences) -> Assignment:
        """The plan of a batch; needs no communication and may be computed ahead."""
        lengths = [one.length for one in sequences_of(rows)]
        return self.assigner.assign(lengths, self.world.world, self.cost)

    def prepare(self, rows: ReplicaSequences) -> ReplicaSequences:
        """Rows with the plan that all ranks will go by, on the first rank; may be called ahead."""
        return rows if self.world.rank else rows._replace(plan=self.planned(rows))

    def events(self) -> Mapping[str, Mapping[str, Any]]:
        """How the sequences of the last step were shared out, and where activations went."""
        plan, host = self.plan, self.host
        if plan is None:
            return {}
        step = {
            "sequences": len(plan.lengths),
            "shared_sequences": sum(len(s.sequences) for s in plan.steps if len(s.ranks) > 1),
            "micro_steps": len(plan.steps),
            "idle_share": predict(plan, self.cost).idle_share,
        }
        if host is not None:
            step |= {"kept_bytes": host.kept_bytes, "offloaded_bytes": host.sent_bytes}
        return {"step": step}

    def step(self, rows: ReplicaSequences, scale: float) -> Tensor:
        """Forward and backward passes of this rank's micro-steps; gradients are not yet summed.

        Args:
            rows: the whole batch, the same on every rank.
            scale: factor of every loss sum before it goes backward.

        Returns:
            Loss sum over this rank's tokens.

        Raises:
            PlanError: the plan does not compute every sequence once.
        """
        device = rows.inputs.device
        sequences = sequences_of(rows)
        self.plan = plan = self._agreed(rows)
        plan.check()
        total = torch.zeros((), dtype=torch.float64, device=device)
        mine = plan.of(self.world.rank)
        if self.host is not None:
            self.host.begin()
        if not mine:
            with self.around(True):
                pass  # zeros to add to the others' gradients
        for number, step in enumerate(mine):
            batch = self.microbatch(rows, [sequences[n] for n in step.sequences], step, plan)
            away = nullcontext() if self.host is None else self.host.during(step.offloaded)
            with self.span("forward"), self.autocast(), away:
                loss = self.stage(None, batch, recompute=self.recompute)
            total += loss.detach()
            with self.span("backward"), self.around(number + 1 == len(mine)):
                (loss * scale).backward()  # type: ignore[no-untyped-call]
        return total

    def microbatch(
        self,
        rows: ReplicaSequences,
        chosen: list[SequenceSegment],
        step: MicroStep,
        plan: Assignment,
    ) -> MicroBatch:
        """This rank's tokens of a micro-step, as a row of its own."""
        device, width = rows.inputs.device, rows.inputs.shape[1]
        whole = torch.cat(
            [torch.arange(s.row * width + s.start, s.row * width + s.stop) for s in chosen]
        )
        place = step.ranks.index(self.world.rank)
        own = shares(len(whole), len(step.ranks), plan.exchange)[place]
        numbers = whole[torch.from_numpy(own)].to(device)
        lengths = [one.length for one in chosen]
        return MicroBatch(
            rows.inputs.reshape(-1)[numbers].unsqueeze(0),
            rows.targets.reshape(-1)[numbers].unsqueeze(0),
            # As in the row: where a document stands in it changes nothing, but bits.
            numbers % width,
            None,
            0,
            rows.step,
            mix=mix_of(lengths, step.ranks, plan.exchange, self.world),
            numbers=numbers + rows.first * width,
            length=width,
        )

    def _agreed(self, rows: ReplicaSequences) -> Assignment:
        """The first rank's plan, on every rank: a solver's answer depends on the time it has."""
        device = rows.inputs.device
        lengths = tuple(one.length for one in sequences_of(rows))
        words: list[int] = []
        if self.world.rank == 0:
            plan = rows.plan or self.planned(rows)
            words = _words(plan)
        size = torch.tensor([len(words)], dtype=torch.int64, device=device)
        self.world.broadcast(size, 0, tag="assignment").wait()
        sent = torch.zeros(int(size), dtype=torch.int64, device=device)
        if words:
            sent.copy_(torch.tensor(words, dtype=torch.int64))
        self.world.broadcast(sent, 0, tag="assignment").wait()
        return _read(sent.tolist(), lengths)


def sequences_of(rows: ReplicaSequences) -> list[SequenceSegment]:
    """The sequences of a batch, in the order of its plans."""
    documents = None if rows.documents is None else rows.documents.cpu().numpy()
    return segments(documents, *rows.inputs.shape)


def _words(plan: Assignment) -> list[int]:
    words = [plan.ranks, _EXCHANGES.index(plan.exchange)]
    for step in plan.steps:
        share = round(step.offloaded * _WHOLE)
        words += [len(step.sequences), len(step.ranks), share, *step.sequences, *step.ranks]
    return words


def _read(words: list[int], lengths: tuple[int, ...]) -> Assignment:
    steps = []
    at = 2
    while at < len(words):
        sequences, ranks, share = words[at : at + 3]
        first, middle = at + 3, at + 3 + sequences
        at = middle + ranks
        own, group = tuple(words[first:middle]), tuple(words[middle:at])
        steps.append(MicroStep(own, group, share / _WHOLE))
    return Assignment(lengths, words[0], tuple(steps), _EXCHANGES[words[1]])
