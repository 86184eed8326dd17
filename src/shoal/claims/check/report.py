"""A verdict as text."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.claims.check.compare import BROKEN
from shoal.claims.check.protocols import CheckRow, CheckVerdict
from shoal.core.tables import Table, table_of

_SHOWN = 10


def _mesh(verdict: CheckVerdict) -> str:
    return " x ".join(f"{name} {size}" for name, size in verdict.mesh.items())


def headline(verdict: CheckVerdict) -> str:
    """The outcome in a line."""
    ranks = 1
    for size in verdict.mesh.values():
        ranks *= size
    steps = "1 step" if verdict.steps == 1 else f"{verdict.steps} steps"
    where = f"{ranks} ranks ({_mesh(verdict)})"
    if verdict.equal:
        return (
            f"equal: {where} compute the same as one process: loss, {verdict.compared} tensors, "
            f"{steps} in {verdict.dtype}"
        )
    if verdict.steps == 0:
        return f"differs before the first step: {where}; first: {verdict.first}"
    what = f"first: {verdict.first}" if verdict.first else "only the loss"
    if verdict.first and verdict.culprits and verdict.first not in verdict.culprits:
        what += f"; the probable cause is {', '.join(verdict.culprits[:2])}"
    return f"differs in step {verdict.steps - 1}: {where}; {what}"


def summary(verdict: CheckVerdict) -> list[str]:
    """What stands between headline and table."""
    lines = []
    for step, (one, split) in enumerate(verdict.losses):
        other = "none" if split is None else f"{split:.12g}"
        lines.append(f"step {step}: loss {one:.12g} in one process, {other} split")
    worst = ", ".join(f"{kind} {_error(error)}" for kind, error in verdict.worst.items())
    lines.append(f"largest relative errors: {worst} (allowed: {verdict.tolerance:g})")
    return lines


def _error(error: float) -> str:
    return "none, because some cannot be compared" if error >= BROKEN else f"{error:.1e}"


def tables(verdict: CheckVerdict) -> Iterator[Table | str]:
    """A verdict for people: the outcome, what differs and why."""
    yield headline(verdict)
    for finding in verdict.findings:
        yield f"  {finding.text}"
    yield from summary(verdict)
    rows = [_row_cells(row, verdict.tolerance) for row in verdict.rows[:_SHOWN]]
    yield table_of("", ("step", "kind", "name", "relative error", "rank", ""), rows, "r  rr")
    hidden = len(verdict.rows) - _SHOWN
    if hidden > 0:
        yield f"and {hidden} more; -o json has all"
    for note in verdict.notes:
        yield f"note: {note}"


def _row_cells(row: CheckRow, limit: float) -> tuple[str, ...]:
    """The cells of a row of the table."""
    return (
        str(row.step) if row.step >= 0 else "",
        row.kind,
        row.name,
        "" if row.note else f"{row.error:.2e}",
        str(row.rank),
        row.note or ("" if row.error <= limit else "differs"),
    )
