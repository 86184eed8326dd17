"""``--emit``: write launch files, and say which plan they are of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.ir import Plan


def write_emitted(
    plans: Sequence[Plan[Any]], engine: str, directory: Path | None, parts: str = "emitter"
) -> None:
    """Write the files of ``engine``; see :func:`shoal.plan.emit.write.emit`."""
    from shoal.core.parts import table
    from shoal.plan.emit.write import emit

    where = directory or Path(f"launch-{engine}")
    chosen, files = emit(plans, engine, where, parts)
    if chosen is not plans[0]:
        place = next(at for at, plan in enumerate(plans, 1) if plan is chosen)
        refused = "; ".join(table(parts).build(engine).refuses(plans[0]))
        typer.echo(
            f"plan {place} is the best one that {engine} can run; it cannot run plan 1: {refused}",
            err=True,
        )
    typer.echo(f"saved {', '.join([*files, 'plan.yaml'])} in {where}", err=True)
