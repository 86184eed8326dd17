"""Simulate a pipeline's schedule: when every pass begins and ends, and what a rank then holds.

The simulator reads the very :class:`~shoal.ir.schedule.Schedule` that the runtime executes. A
rank does its passes in program order; a pass begins when its rank is free and what it needs has
arrived. Sending takes no time of a rank, and transfers do not queue behind one another.

All ranks advance together, one pass each a round, so two million passes of a thousand ranks
take some thousand rounds of array arithmetic.

Source: Narayanan et al., Efficient Large-Scale Language Model Training, 2021 (closed forms);
Yeung et al., Vocabulary Parallelism, 2024 (synchronisations of the vocabulary's shards).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core.errors import PlanError, require
from shoal.cost.price.collectives import send_s
from shoal.ir import Layout, Machine
from shoal.ir.schedule import KINDS, Event, LinkModel, Op, OpCosts, Schedule

_Ints: TypeAlias = npt.NDArray[np.int64]
_Floats: TypeAlias = npt.NDArray[np.float64]

_CODE: dict[str, int] = {kind: code for code, kind in enumerate(KINDS)}
_F, _B, _I, _W, _EF, _EB, _S, _T = range(len(KINDS))


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of the passes of a step, one column entry per pass.

    Passes are ordered by rank, and those of a rank by program order.

    Args:
        name: what it is a timeline of.
        ranks: ranks of the pipeline.
        rank: [N] who does the pass.
        kind: [N] index of the kind in :data:`~shoal.ir.schedule.KINDS`.
        stage: [N] the stage, or the shard of the vocabulary.
        mb: [N] the micro-batch.
        start: [N] s after the step began.
        end: [N] s after the step began.
        peak_held_bytes: by rank, most bytes of activations held at once; empty if unknown. A
            forward holds ``OpCosts.held_bytes`` of its stage until its ``B`` or ``W`` ends; ``I``
            releases nothing, because ``W`` still needs the inputs.
    """

    name: str
    ranks: int
    rank: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    stage: npt.NDArray[np.int32]
    mb: npt.NDArray[np.int32]
    start: _Floats
    end: _Floats
    peak_held_bytes: tuple[float, ...] = ()

    @classmethod
    def of(cls, events: Iterable[Event], *, name: str = "measured", ranks: int = 0) -> Timeline:
        """The timeline of events in any order, such as those of a run.

        Args:
            events: the passes.
            name: what it is a timeline of.
            ranks: ranks of the pipeline; at least as many as the events name.

        Raises:
            PlanError: a pass of unknown kind, or one that ends before it starts.
        """
        rows = sorted(events, key=lambda event: (event.rank, event.start, event.end))
        for event in rows:
            require(
                event.op.kind in _CODE and event.end >= event.start,
                f"{name}: event {event.op} of rank {event.rank}",
                f"{event.start:g} .. {event.end:g} s",
                expected=f"a pass of kind {', '.join(KINDS)} that ends after it starts",
                error=PlanError,
            )
        return cls(
            name=name,
            ranks=max([ranks, *(event.rank + 1 for event in rows)]),
            rank=np.array([event.rank for event in rows], np.int32),
            kind=np.array([_CODE[event.op.kind] for event in rows], np.int8),
            stage=np.array([event.op.stage for event in rows], np.int32),
            mb=np.array([event.op.mb for event in rows], np.int32),
            start=np.array([event.start for event in rows], np.float64),
            end=np.array([event.end for event in rows], np.float64),
        )

    def __len__(self) -> int:
        return len(self.rank)

    @cached_property
    def makespan(self) -> float:
        """Seconds until the last pass ends."""
        return float(self.end.max()) if len(self) else 0.0

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """By rank, seconds in passes."""
        spent = np.bincount(self.rank, weights=self.end - self.start, minlength=self.ranks)
        return tuple(spent.tolist())

    @cached_property
    def bubble(self) -> float:
        """Idle time of all ranks as a share of their work."""
        work = math.fsum(self.busy)
        return self.ranks * self.makespan / work - 1.0 if work else 0.0

    def events(self, ranks: Iterable[int] | None = None) -> Iterator[Event]:
        """The passes, by rank and in program order; those of ``ranks`` alone if given."""
        columns = (self.rank, self.kind, self.stage, self.mb, self.start, self.end)
        mine = slice(None) if ranks is None else np.isin(self.rank, list(ranks))
        for rank, kind, stage, mb, start, end in zip(
            *(column[mine].tolist() for column in columns), strict=True
        ):
            yield Event(rank, Op(KINDS[kind], stage, mb), start, end)


@dataclass(frozen=True)
class UniformLinks:
    """The same link between any two ranks.

    Args:
        bandwidth: byte/s.
        latency_s: one small message.
    """

    bandwidth: float = math.inf
    latency_s: float = 0.0

    def seconds(self, source: int, target: int, nbytes: float) -> float:
        """Latency and bytes over bandwidth; 0 within a rank."""
        return 0.0 if source == target else self.latency_s + nbytes / self.bandwidth


@dataclass(frozen=True)
class MachineLinks:
    """The links of a machine between the ranks of one pipeline.

    Ranks fill the nodes in order. Two ranks of one node talk over its ``device`` (of a CPU:
    ``loopback``) link, others over the ``node`` link; a machine without one of the links uses the
    other.

    Args:
        machine: what there is.
        layout: which ranks there are; rank i of the pipeline is at ``i`` on its ``pp`` axis.
    """

    machine: Machine
    layout: Layout

    @cached_property
    def _stride(self) -> int:
        return self.layout.rank({"pp": 1}) if self.layout.size("pp") > 1 else 0

    @cached_property
    def _per_node(self) -> int:
        if self.machine.device.kind == "gpu":
            return self.machine.devices_per_node
        return max(1, math.ceil(self.layout.world / self.machine.nodes))

    def scope(self, source: int, target: int) -> str:
        """Scope of the link between two ranks of the pipeline; empty where none is described."""
        near = source * self._stride // self._per_node == target * self._stride // self._per_node
        inside = ("device",) if self.machine.device.kind == "gpu" else ("loopback", "device")
        order = (*inside, "node") if near else ("node", *inside)
        return next((scope for scope in order if self.machine.link(scope)), "")

    def seconds(self, source: int, target: int, nbytes: float) -> float:
        """Latency and bytes over bandwidth; 0 within a rank, or where no link is described."""
        if source == target:
            return 0.0
        return send_s(nbytes, self.machine.link(self.scope(source, target)))


def simulate(schedule: Schedule, cost: OpCosts, links: LinkModel | None = None) -> Timeline:
    """When every pass of ``schedule`` begins and ends.

    Args:
        schedule: who does what in which order.
        cost: seconds and bytes of the passes. ``barrier_s`` is charged where the shards of the
            vocabulary meet: embedding to first stage, last stage to ``S``, after ``S``, after
            ``T`` (two barriers), and first stage's backward to ``EB``.
        links: seconds of a boundary between ranks; None makes transfers free.

    Raises:
        PlanError: the schedule is incomplete or deadlocks (names the pass), or the cost does
            not say what a pass costs.
    """
    table = _Passes.of(schedule)
    seconds = _seconds(table, cost)
    need, delay = _needs(table, cost, links)
    start, end = _run(table, seconds, need, delay)
    return Timeline(
        name=schedule.name,
        ranks=schedule.ranks,
        rank=table.rank.astype(np.int32),
        kind=table.kind.astype(np.int8),
        stage=table.stage.astype(np.int32),
        mb=table.mb.astype(np.int32),
        start=start,
        end=end,
        peak_held_bytes=_held(table, cost),
    )


@dataclass(frozen=True, eq=False)
class _Passes:
    """The passes of a schedule as columns, rank after rank in program order; -1 is no pass."""

    schedule: Schedule
    first: _Ints
    rank: _Ints
    kind: _Ints
    stage: _Ints
    mb: _Ints
    forward: _Ints
    backward: _Ints
    inputs: _Ints

    @classmethod
    def of(cls, schedule: Schedule) -> _Passes:
        lengths = [len(program) for program in schedule.ops]
        count, stages = sum(lengths), max(schedule.stages, schedule.ranks)
        kind, stage, mb = (np.empty(count, np.int64) for _ in range(3))
        first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        for rank, program in enumerate(schedule.ops):
            if not program:
                continue
            here = slice(first[rank], first[rank + 1])
            kinds, stage[here], mb[here] = zip(*program, strict=True)
            try:
                kind[here] = [_CODE[name] for name in kinds]
            except KeyError as cause:
                raise PlanError(
                    f"schedule {schedule.name}: rank {rank} does a pass of kind {cause}; "
                    f"there are {', '.join(KINDS)}"
                ) from None
        if count and (
            min(stage.min(), mb.min()) < 0
            or stage.max() >= stages
            or mb.max() >= schedule.microbatches
        ):
            schedule.validate()
        where = np.full((3, stages, schedule.microbatches), -1, np.int64)
        places = np.arange(count)
        for row, codes in ((0, (_F,)), (1, (_B, _I)), (2, (_I,))):
            for code in codes:
                mine = places[kind == code]
                where[row, stage[mine], mb[mine]] = mine
        return cls(
            schedule=schedule,
            first=first,
            rank=np.repeat(np.arange(schedule.ranks), lengths),
            kind=kind,
            stage=stage,
            mb=mb,
            forward=where[0],
            backward=where[1],
            inputs=where[2],
        )

    def __len__(self) -> int:
        return len(self.kind)

    def neighbours(self) -> tuple[_Ints, _Ints, _Ints, _Ints]:
        """[stages, mb] stage before and after on the route, [mb] its first and last stage."""
        plan = self.schedule
        before = np.repeat(np.arange(plan.stages)[:, None] - 1, plan.microbatches, axis=1)
        after = before + 2
        after[-1] = -1
        first = np.zeros(plan.microbatches, np.int64)
        last = np.full(plan.microbatches, plan.stages - 1, np.int64)
        for mb, route in plan.routes.items():
            stops = np.array(route, np.int64)
            before[:, mb] = after[:, mb] = -1
            before[stops[1:], mb] = stops[:-1]
            after[stops[:-1], mb] = stops[1:]
            first[mb], last[mb] = route[0], route[-1]
        return before, after, first, last


def _seconds(table: _Passes, cost: OpCosts) -> _Floats:
    """[N] seconds of each pass."""
    plan = table.schedule
    seconds = np.empty(len(table), np.float64)
    for code, kind in enumerate(KINDS):
        mine = table.kind == code
        if not mine.any():
            continue
        size = plan.stages if kind in "FBIW" else plan.ranks
        given = cost.seconds.get(kind, ())
        require(
            len(given) == size,
            f"seconds of {kind} in schedule {plan.name}",
            f"{len(given)} numbers",
            expected=f"{size}, one for each {'stage' if kind in 'FBIW' else 'rank'}",
            error=PlanError,
        )
        seconds[mine] = np.array(given)[table.stage[mine]]
    return seconds


def _needs(table: _Passes, cost: OpCosts, links: LinkModel | None) -> tuple[_Ints, _Floats]:
    """[N] the pass of elsewhere that a pass waits for, and the seconds from there to here.

    Numbers above the passes: N is nothing, N + 1 + 3 mb + (0, 1, 2) are the meetings of all
    shards after ``EF``, ``S``, ``T`` of a micro-batch.
    """
    plan, count = table.schedule, len(table)
    need = np.full(count, count, np.int64)
    delay = np.zeros(count, np.float64)
    before, after, first, last = table.neighbours()
    meet = cost.barrier_s if plan.ranks > 1 else 0.0

    def of(*codes: int) -> _Ints:
        return np.flatnonzero(np.isin(table.kind, codes))

    def chain_up(mine: _Ints, beside: _Ints, done: _Ints, meeting: int) -> None:
        """Passes of stages wait for the stage beside them; at the end of the route, for all."""
        stage, mb = table.stage[mine], table.mb[mine]
        other = beside[stage, mb]
        inner = other >= 0
        need[mine[inner]] = done[other[inner], mb[inner]]
        if links is not None and inner.any():
            source, target = table.rank[need[mine[inner]]], table.rank[mine[inner]]
            pairs, which = np.unique(source * plan.ranks + target, return_inverse=True)
            cross = [
                0.0 if a == b else links.seconds(a, b, cost.boundary_bytes)
                for a, b in (divmod(int(pair), plan.ranks) for pair in pairs)
            ]
            delay[mine[inner]] = np.array(cross)[which]
        if plan.vocab_barriers:
            need[mine[~inner]] = count + 1 + 3 * mb[~inner] + meeting
            delay[mine[~inner]] = meet

    forward, backward = of(_F), of(_B, _I)
    chain_up(forward, before, table.forward, 0)
    chain_up(backward, after, table.backward, 2 if plan.vocab_barriers == 2 else 1)
    for code, done, end in ((_S, table.forward, last), (_EB, table.backward, first)):
        mine = of(code)
        need[mine] = done[end[table.mb[mine]], table.mb[mine]]
        delay[mine] = meet
    mine = of(_T)
    need[mine] = count + 1 + 3 * table.mb[mine] + 1
    delay[mine] = meet
    # What a pass needs of its own rank comes before it in program order, or never.
    own = (
        (backward, table.forward[table.stage[backward], table.mb[backward]]),
        (of(_W), table.inputs[table.stage[of(_W)], table.mb[of(_W)]]),
    )
    if (need.size and need.min() < 0) or any((at < 0).any() or (at > b).any() for b, at in own):
        plan.validate()
        raise PlanError(f"schedule {plan.name}: a pass needs one that is never done")
    return need, delay


def _run(table: _Passes, seconds: _Floats, need: _Ints, delay: _Floats) -> tuple[_Floats, _Floats]:
    """[N] start and end of each pass."""
    plan, count = table.schedule, len(table)
    start = np.zeros(count)
    # Not a number is not done yet; the entry after the passes is nothing, always there.
    end = np.full(count + 1 + 3 * plan.microbatches, np.nan)
    end[count] = 0.0
    meeting = np.full(count, -1, np.int64)
    for row, code in enumerate((_EF, _S, _T)):
        mine = table.kind == code
        meeting[mine] = count + 1 + 3 * table.mb[mine] + row
    meets = bool((meeting >= 0).any())
    latest = np.zeros(len(end))
    absent = np.full(len(end), plan.ranks)
    at, stop, free = table.first[:-1].copy(), table.first[1:], np.zeros(plan.ranks)
    active = np.flatnonzero(at < stop)
    while active.size:
        heads = at[active]
        arrived = end[need[heads]] + delay[heads]
        ready = arrived == arrived
        who, ops = active[ready], heads[ready]
        if not who.size:
            plan.validate()
            raise PlanError(f"schedule {plan.name}: every rank waits for another")
        begin = np.maximum(free[who], arrived[ready])
        start[ops] = begin
        begin += seconds[ops]
        end[ops] = free[who] = begin
        at[who] += 1
        if meets:
            where = meeting[ops]
            there = where >= 0
            np.maximum.at(latest, where[there], begin[there])
            np.subtract.at(absent, where[there], 1)
            whole = where[there][absent[where[there]] == 0]
            end[whole] = latest[whole]
        active = active[at[active] < stop[active]]
    return start, end[:count]


def _held(table: _Passes, cost: OpCosts) -> tuple[float, ...]:
    """By rank, most bytes of activations at once; empty if the cost does not know them."""
    plan = table.schedule
    if not cost.held_bytes:
        return ()
    require(
        len(cost.held_bytes) == plan.stages,
        f"held_bytes in schedule {plan.name}",
        f"{len(cost.held_bytes)} numbers",
        expected=f"{plan.stages}, one for each stage",
        error=PlanError,
    )
    sign = np.zeros(len(KINDS))
    sign[[_F, _B, _W]] = 1.0, -1.0, -1.0
    stages = np.array([*cost.held_bytes, *[0.0] * max(0, plan.ranks - plan.stages)])
    change = sign[table.kind] * stages[table.stage]
    return tuple(
        float(np.cumsum(change[a:b]).max(initial=0.0))
        for a, b in zip(table.first[:-1], table.first[1:], strict=True)
    )
