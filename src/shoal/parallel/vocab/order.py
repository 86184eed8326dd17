"""What a schedule says about the messages of the vocabulary's passes; needs no torch."""

from __future__ import annotations

from shoal.core.errors import PlanError, require
from shoal.ir.schedule import Op, Schedule


def check_order(schedule: Schedule, world: int) -> None:
    """Refuse a schedule that the vocabulary's passes cannot run.

    Raises:
        PlanError: it does not split the vocabulary, is for other ranks, or has ranks that go
            through the micro-batches in different orders.
    """
    require(
        schedule.ranks == world,
        "vocabulary passes: ranks of the schedule",
        schedule.ranks,
        expected=f"{world}, the ranks of the pipeline",
        error=PlanError,
    )
    require(
        schedule.vocab_barriers in (1, 2),
        "vocabulary passes: barriers of the schedule",
        schedule.vocab_barriers,
        expected="1 or 2; choose parallel.vocab = pp",
        error=PlanError,
    )
    # Messages carry no number of their micro-batch: they arrive in the order of sending, so all
    # ranks have one order of a pass, and what it waits for is sent in that order.
    for kind in ("EF", "S", "T", "EB"):
        order = [op.mb for op in schedule.ops[0] if op.kind == kind]
        place = {mb: at for at, mb in enumerate(order)}
        for ops in schedule.ops:
            same = [op.mb for op in ops if op.kind == kind] == order
            sent = [
                place[op.mb]
                for op in ops
                if op.mb in place and op == _source(schedule, kind, op.mb)
            ]
            if not same or sent != sorted(sent):
                raise PlanError(
                    f"schedule {schedule.name}: {kind} passes and what they wait for are in "
                    "different orders of the micro-batches; give all ranks the same order"
                )


def _source(schedule: Schedule, kind: str, mb: int) -> Op | None:
    """The pass of a stage whose result the passes of this kind wait for, if there is one."""
    route = schedule.route(mb)
    if kind == "S":
        return Op("F", route[-1], mb)
    return schedule.backward(route[0], mb) if kind == "EB" else None


def arrived(schedule: Schedule, rank: int) -> dict[int, list[int]]:
    """EB pass of ``rank`` -> micro-batches whose EB every rank has surely done by then.

    A rank knows that another has done a pass if its own pass follows from it; each pass
    therefore knows, by rank, how far that rank's program has come.
    """
    known: dict[Op, tuple[int, ...]] = {}
    nothing = (0,) * schedule.ranks
    at = [0] * schedule.ranks
    latest = [nothing] * schedule.ranks
    moving = True
    while moving:
        moving = False
        for r, program in enumerate(schedule.ops):
            while at[r] < len(program):
                before = list(schedule.before(program[at[r]]))
                if any(op not in known for op in before):
                    break
                at[r] += 1
                seen = [latest[r], *(known[op] for op in before)]
                far = list(map(max, zip(*seen, strict=True)))
                far[r] = at[r]
                latest[r] = known[program[at[r] - 1]] = tuple(far)
                moving = True
    number = [{op: i for i, op in enumerate(ops, 1)} for ops in schedule.ops]
    own = [op for op in schedule.ops[rank] if op.kind == "EB"]
    result: dict[int, list[int]] = {}
    waiting = [op.mb for op in own]
    for op in own:
        reach = known.get(op, nothing)
        done = [
            mb
            for mb in waiting
            if all(number[r][Op("EB", r, mb)] <= reach[r] for r in range(schedule.ranks))
        ]
        waiting = [mb for mb in waiting if mb not in done]
        result[op.mb] = done
    return result
