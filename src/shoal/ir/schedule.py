"""The order in which the stages of a pipeline do their work: one description for all.

A schedule says for every rank which passes it does, in which order. The simulator of
``cost.pipeline`` and the runtime of ``parallel.pipeline`` read the same object, so nothing
is only simulated. Transfers are not written down: what a pass needs from another rank
follows from the routes, so that a send without its receive cannot be said.

Passes, by the letters of the field:

``F``, ``B``
    forward, and backward in one piece, of one stage for one micro-batch.
``I``, ``W``
    backward in two pieces: gradient of the input, gradient of the weights.
``EF``, ``EB``
    look-up in, and gradient of, one shard of the embedding; ``stage`` is the shard.
``S``, ``T``
    the two passes of one shard of the output layer; ``stage`` is the shard.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024 (I and W); Yeung et al., Vocabulary
Parallelism, 2024 (S and T); Blagoev et al., SkipPipe, 2025 (routes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, Protocol, Self

from shoal.core.config import Value
from shoal.core.errors import PlanError
from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.plan import Work

Kind = Literal["F", "B", "I", "W", "EF", "EB", "S", "T"]

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W", "EF", "EB", "S", "T")


class Op(NamedTuple):
    """One pass.

    Args:
        kind: one of :data:`KINDS`.
        stage: the stage, or the shard of the vocabulary.
    """

    kind: str
    stage: int
    mb: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.mb}"


@dataclass(frozen=True)
class Schedule:
    """Passes by rank, in program order.

    Args:
        name: name of the part that built it.
        ops: passes of each rank.
        place: rank of each stage.
        microbatches: number of micro-batches.
        routes: micro-batch -> the stages it visits, in order; those not named visit all.
        vocab_barriers: 0 keeps the embedding in the first and the output layer in the last
            stage; 1 or 2 split both over all ranks, shard r on rank r, with so many
            synchronisations of a micro-batch between its ``S`` pass and its first backward.
        cells: by stage, which part of the model it computes; stages of one cell are replicas,
            whose gradients are summed. Empty: stage s is cell s. Where they are given, so are the
            routes of all micro-batches.
        bare_head: the last cell is the final norm and the output layer, without a block.
    """

    name: str
    ops: tuple[tuple[Op, ...], ...]
    place: tuple[int, ...]
    microbatches: int
    routes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    vocab_barriers: int = 0
    cells: tuple[int, ...] = ()
    bare_head: bool = False

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.ops)

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.place)

    @cached_property
    def cell_of(self) -> tuple[int, ...]:
        """By stage, the part of the model that it computes."""
        return self.cells or tuple(range(self.stages))

    @cached_property
    def num_cells(self) -> int:
        """Parts that the model is cut into."""
        return max(self.cell_of) + 1

    @cached_property
    def _everywhere(self) -> tuple[int, ...]:
        return tuple(range(self.stages))

    @cached_property
    def whole_route(self) -> tuple[int, ...]:
        """A route through the whole model, by the first replica of every cell."""
        return tuple(self.cell_of.index(cell) for cell in range(self.num_cells))

    def route(self, mb: int) -> tuple[int, ...]:
        """Stages that micro-batch ``mb`` visits, in order."""
        return self.routes.get(mb, self._everywhere)

    def rank_of(self, op: Op) -> int:
        """The rank that does ``op``."""
        return self.place[op.stage] if op.kind in "FBIW" else op.stage

    @cached_property
    def splits(self) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) whose backward is ``I`` and ``W`` instead of ``B``."""
        return frozenset((op.stage, op.mb) for ops in self.ops for op in ops if op.kind == "I")

    def backward(self, stage: int, mb: int) -> Op:
        """The pass that gives the gradient of this stage's input."""
        return Op("I" if (stage, mb) in self.splits else "B", stage, mb)

    def before(self, op: Op) -> Iterator[Op]:
        """Passes whose result ``op`` needs; passes of its own rank included."""
        kind, stage, mb = op
        if kind == "F":
            route = self.route(mb)
            at = route.index(stage) if self.routes else stage
            if at:
                yield Op("F", route[at - 1], mb)
            elif self.vocab_barriers:
                yield from (Op("EF", shard, mb) for shard in range(self.ranks))
        elif kind in ("B", "I"):
            yield Op("F", stage, mb)
            route = self.route(mb)
            at = route.index(stage) if self.routes else stage
            if at + 1 < len(route):
                yield self.backward(route[at + 1], mb)
            elif self.vocab_barriers:
                last = "T" if self.vocab_barriers == 2 else "S"
                yield from (Op(last, shard, mb) for shard in range(self.ranks))
        elif kind == "W":
            yield Op("I", stage, mb)
        elif kind == "S":
            yield Op("F", self.route(mb)[-1], mb)
        elif kind == "T":
            yield from (Op("S", shard, mb) for shard in range(self.ranks))
        elif kind == "EB":
            yield self.backward(self.route(mb)[0], mb)

    def expected(self) -> Iterator[Op]:
        """Every pass that has to be done, once; of split backwards both halves."""
        for mb in range(self.microbatches):
            for stage in self.route(mb):
                yield Op("F", stage, mb)
                backward = self.backward(stage, mb)
                yield backward
                if backward.kind == "I":
                    yield Op("W", stage, mb)
            if self.vocab_barriers:
                for shard in range(self.ranks):
                    for kind in ("EF", "S", "T", "EB"):
                        yield Op(kind, shard, mb)

    def validate(self) -> None:
        """Check that every pass is done once, on its own rank, and that no rank waits for ever.

        Raises:
            PlanError: names the first pass that is wrong and why.
        """
        if self.cells and (
            len(self.cells) != self.stages or set(self.routes) != set(range(self.microbatches))
        ):
            raise PlanError(
                f"schedule {self.name}: {len(self.cells)} cells and {len(self.routes)} routes; "
                f"expected a cell for each of {self.stages} stages, and a route for each of "
                f"{self.microbatches} micro-batches"
            )
        done: dict[Op, int] = {}
        for rank, ops in enumerate(self.ops):
            for op in ops:
                if op in done:
                    raise PlanError(f"schedule {self.name}: {op} is done twice; do it once")
                if not 0 <= op.stage < (self.stages if op.kind in "FBIW" else self.ranks):
                    raise PlanError(
                        f"schedule {self.name}: {op} is of no stage; there are {self.stages}"
                    )
                if self.rank_of(op) != rank:
                    raise PlanError(
                        f"schedule {self.name}: {op} is done by rank {rank}, and stage {op.stage} "
                        f"lies on rank {self.rank_of(op)}"
                    )
                done[op] = rank
        wanted = set(self.expected())
        missing, extra = wanted - done.keys(), done.keys() - wanted
        if missing or extra:
            what = "is never done" if missing else "belongs to no route"
            raise PlanError(f"schedule {self.name}: {min(missing or extra)} {what}")
        self._run(done)

    def _run(self, rank_of: Mapping[Op, int]) -> None:
        """Go through all programs at once; stops where every rank waits."""
        at = [0] * self.ranks
        finished: set[Op] = set()
        waiting: dict[Op, list[int]] = {}
        ready = list(range(self.ranks))
        while ready:
            rank = ready.pop()
            program = self.ops[rank]
            while at[rank] < len(program):
                op = program[at[rank]]
                blocker = next((need for need in self.before(op) if need not in finished), None)
                if blocker is not None:
                    waiting.setdefault(blocker, []).append(rank)
                    break
                finished.add(op)
                at[rank] += 1
                ready += waiting.pop(op, ())
        stuck = [rank for rank in range(self.ranks) if at[rank] < len(self.ops[rank])]
        if stuck:
            rank = stuck[0]
            op = self.ops[rank][at[rank]]
            need = next(need for need in self.before(op) if need not in finished)
            raise PlanError(
                f"schedule {self.name}: deadlock; rank {rank} waits in {op} for {need} of rank "
                f"{rank_of[need]}, which never comes to it"
            )

    def in_flight(self) -> list[int]:
        """Most micro-batches of a stage, summed over its stages, whose activations a rank holds.

        An output layer alone holds nothing for long and does not count.
        """
        peaks = []
        for ops in self.ops:
            held = peak = 0
            for op in ops:
                if self.bare_head and self.cell_of[op.stage] == self.num_cells - 1:
                    continue
                if op.kind == "F":
                    held += 1
                    peak = max(peak, held)
                elif op.kind in ("B", "W"):
                    held -= 1
            peaks.append(peak)
        return peaks


class OpCosts(Value):
    """What the passes of a schedule cost.

    Args:
        seconds: kind of pass -> seconds by stage (by shard for the vocabulary's passes).
        boundary_bytes: activations of one micro-batch that cross from stage to stage.
        held_bytes: by stage, activations that a micro-batch keeps from forward to backward.
        weight_bytes: by rank, weights, gradients and optimizer state.
        barrier_s: seconds of one synchronisation of the vocabulary's shards.
    """

    seconds: dict[str, tuple[float, ...]]
    boundary_bytes: float = 0.0
    held_bytes: tuple[float, ...] = ()
    weight_bytes: tuple[float, ...] = ()
    barrier_s: float = 0.0

    def of(self, op: Op) -> float:
        """Seconds of ``op``."""
        return self.seconds[op.kind][op.stage]

    @classmethod
    def uniform(
        cls,
        stages: int,
        *,
        forward: float = 1.0,
        backward: float = 2.0,
        boundary_bytes: float = 0.0,
    ) -> OpCosts:
        """Equal stages; the gradients of input and weights take half of the backward pass each."""
        each = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
        return cls(
            seconds={kind: (value,) * stages for kind, value in each.items()},
            boundary_bytes=boundary_bytes,
            held_bytes=(1.0,) * stages,
        )


class LinkModel(Protocol):
    """What it takes to send from rank to rank."""

    def seconds(self, source: int, target: int, nbytes: float) -> float:
        """Seconds from the start of sending to the end of receiving; 0 within a rank."""


class Event(NamedTuple):
    """One pass as it was done, or as it is predicted to be done.

    Args:
        rank: by whom.
    """

    rank: int
    op: Op
    start: float
    end: float


class SchedulePart(Protocol):
    """A part of kind ``schedule``: builds schedules for pipelines of any size."""

    chunks: ClassVar[int | None]
    """Stages of a rank; None takes any number."""

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[tuple[Self, int]]:
        """What is worth trying for the split of a job, each with the stages of a rank.

        A part that offers nothing leaves it out: a planner then never proposes it.
        """

    def build(self, pp: int, microbatches: int, vpp: int = 1) -> Schedule:
        """The schedule of ``pp`` ranks with ``vpp`` stages each.

        Raises:
            PlanError: numbers that it does not fit; names those that it would.
        """

    def bubble(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """Idle time of a rank as a share of its work, for equal stages and free transfers."""

    def in_flight(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """Most micro-batches whose activations, of all its layers, the fullest rank holds."""

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes that one rank sends to its neighbours in one step, and their seconds."""
