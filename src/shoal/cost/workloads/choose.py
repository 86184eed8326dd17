"""A workload by name and file, as people name it on a command line."""

from __future__ import annotations

from shoal.core.errors import require
from shoal.core.parts import Choice, options_of
from shoal.cost.workloads import WORKLOADS


def choose(name: str | None, path: str | None = None) -> Choice | None:
    """The choice of a workload; None if neither is given.

    Args:
        name: of the workload; ``trace`` if there is only a file.
        path: its file. Without one, a public trace is looked for where it usually lies below
            ``SHOAL_DATA``.

    Raises:
        UnknownPartError: no such workload.
        ConfigError: a file for one that reads none, or none for one that needs it.
    """
    if name is None and path is None:
        return None
    chosen = name or "trace"
    part = WORKLOADS.load(chosen, where="--workload")
    reads = "path" in options_of(part)
    require(
        path is None or reads,
        "--trace",
        path,
        expected=f"no file for workload {chosen}, which makes its requests up",
        hint="leave --workload or --trace out",
    )
    if not reads:
        return Choice(name=chosen)
    where = path or getattr(part, "usual_path", None)
    require(
        where is not None,
        "--workload",
        chosen,
        expected="--trace FILE beside it",
        hint="it replays a file",
    )
    return Choice(name=chosen, options={"path": where})
