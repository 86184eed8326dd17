"""Plans of a recommender: every method, timed in a few steps on this machine."""

from __future__ import annotations

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.kinds import choices
from shoal.fields.retrieve.recommend.events import EventSplit, is_drawn, read_events, split_events
from shoal.fields.retrieve.recommend.job import RecommendJob, RecommendPlan
from shoal.fields.retrieve.recommend.protocols import Recommender, RecommendTask
from shoal.ir import Interval, Machine

# The interpreter with torch and pyarrow, and what is held when ranks are found.
_RUNTIME = 5.7e8
# A layer keeps about so many numbers of an event for its gradients, beside attention.
_KEPT = 16
# Passes over a table, where the job does not say.
_EPOCHS = 10


def split_of(job: RecommendJob) -> EventSplit:
    """What is learned from and judged.

    Raises:
        DataError: the table cannot be read.
        EventError: its events cannot be used.
    """
    events = read_events(job.data, columns=job.columns, sort=job.sort, seed=job.seed)
    return split_events(events, leave_last=not is_drawn(job.data), length=job.length)


def task_of(job: RecommendJob, split: EventSplit) -> RecommendTask:
    """How it learns."""
    drawn = is_drawn(job.data)
    return RecommendTask(
        items=len(split.train.item_names),
        length=job.length,
        dim=job.dim,
        blocks=job.blocks,
        heads=job.heads,
        epochs=job.epochs or (1 if drawn else _EPOCHS),
        batch=job.batch,
        lr=job.lr,
        dropout=job.dropout,
        negatives=job.negatives,
        temperature=job.temperature,
        shuffle=not drawn,
        sparse=job.sparse,
        timed=split.train.timed,
        seed=job.seed,
    )


def plan_recommend(job: RecommendJob, machine: Machine) -> list[RecommendPlan]:
    """The ways to do it: networks before counts, the shortest first.

    Raises:
        ShoalError: the events cannot be read or used.
    """
    split = split_of(job)
    task = task_of(job, split)
    ranked = [
        _plan(job, machine, task, split, choice) for choice in choices(job.method, "recommender")
    ]
    return [plan for _, plan in sorted(ranked, key=lambda one: one[0])]


def _plan(
    job: RecommendJob, machine: Machine, task: RecommendTask, split: EventSplit, choice: Choice
) -> tuple[tuple[bool, float], RecommendPlan]:
    """The plan, and its place among others."""
    method: Recommender = table("recommender").build(choice, where="method")
    cost = method.estimate(task, split.train)
    lengths = np.minimum(split.train.lengths, task.length + 1)
    events = int(np.maximum(lengths - 1, 0).sum())
    longest = float(np.sort(lengths)[-task.batch :].sum())
    kept = (
        4.0
        * longest
        * (task.blocks * (_KEPT * task.dim + 4 * task.heads * lengths.max()) + 3 * task.negatives)
    )
    memory = _RUNTIME + 16.0 * cost.parameters + kept + 48.0 * len(split.train.items)
    spelled = table("recommender").spell(method)
    train_s = cost.event_s * events * task.epochs
    plan = RecommendPlan(
        job=job.model_copy(update={"method": spelled}),
        machine=machine,
        predicted={
            "train_s": Interval.around(train_s, 0.3),
            "memory_bytes": Interval.around(memory, 0.4),
        },
        planner="a few steps of each recommender",
        fits=memory <= machine.device.main_memory.capacity_bytes,
        why=f"{spelled}: {cost.parameters:,} numbers learned from {events * task.epochs:,} events",
        notes=("steps timed on this machine",),
        users=len(split.train),
        items=task.items,
        events=events,
    )
    return (not cost.personal, train_s), plan
