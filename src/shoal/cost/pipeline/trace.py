"""Timelines of a pipeline as a trace that Perfetto and Chrome's tracing page open.

Source: the Trace Event Format of Chrome, 2016.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.errors import PlanError, require
from shoal.cost.pipeline.simulator import Timeline

# Some 150 bytes a pass: the file stays below what a browser loads.
MOST_PASSES = 1_000_000


def trace(timelines: Mapping[str, Timeline], *, unit_s: float = 1.0) -> dict[str, Any]:
    """The trace as plain values: a process is a timeline, a thread of it a rank.

    Args:
        timelines: name -> timeline.
        unit_s: seconds of the timelines' unit of time.

    Raises:
        PlanError: there are too many passes for one file.
    """
    number = sum(map(len, timelines.values()))
    require(
        number <= MOST_PASSES,
        "trace",
        f"{number} passes",
        expected=f"at most {MOST_PASSES}; give fewer ranks or micro-batches",
        error=PlanError,
    )
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_named("process", name, process, 0))
        for rank in range(timeline.ranks):
            events.append(_named("thread", f"rank {rank}", process, rank))
            events.append(
                {
                    "ph": "M",
                    "name": "thread_sort_index",
                    "pid": process,
                    "tid": rank,
                    "args": {"sort_index": rank},
                }
            )
        events += [
            {
                "ph": "X",
                "name": str(op),
                "cat": op.kind,
                "pid": process,
                "tid": rank,
                "ts": 1e6 * unit_s * start,
                "dur": 1e6 * unit_s * (end - start),
                "args": {"kind": op.kind, "stage": op.stage, "microbatch": op.mb},
            }
            for rank, op, start, end in timeline.events()
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, name: str, process: int, rank: int) -> dict[str, Any]:
    key = f"{what}_name"
    return {"ph": "M", "name": key, "pid": process, "tid": rank, "args": {"name": name}}
