"""Writing the traces that the workload ``trace`` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from shoal.ir import Arrival


def write_trace(path: Path, arrivals: Sequence[Arrival]) -> None:
    """Write arrivals as a trace that :class:`~shoal.cost.workloads.trace.TraceWorkload` reads."""
    lines = (
        json.dumps(
            {
                "at": one.at,
                "prompt": list(one.prompt),
                "output_tokens": one.output_tokens,
                "session": one.session,
            },
            separators=(",", ":"),
        )
        for one in arrivals
    )
    path.write_text("".join(f"{line}\n" for line in lines))
