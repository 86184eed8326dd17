"""Write the launch files of another engine for the best plan that it can run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.ir import ServePlan, TrainPlan

__all__ = ["write_emitted"]


def write_emitted(
    plans: Sequence[TrainPlan] | Sequence[ServePlan], engine: str, directory: Path | None
) -> None:
    """Write the files of ``engine`` for the first plan that it can run, and that plan beside them.

    Args:
        plans: ranked plans.
        engine: name of a part of kind ``emitter``.
        directory: where to; ``launch-ENGINE`` if None.

    Raises:
        UnknownPartError: there is no such engine.
        PlanError: it can run none of them; the message says why not the first.
    """
    from shoal.core.files import write_atomic
    from shoal.plan.emit import EMITTERS

    emitter = EMITTERS.build(engine, where="--emit")
    place = next((i for i, plan in enumerate(plans) if not emitter.refuses(plan)), 0)
    chosen = plans[place]
    files = emitter.emit(chosen)
    where = directory or Path(f"launch-{engine}")
    for name, text in files.items():
        write_atomic(where / name, text)
    chosen.save(where / "plan.yaml", header=f"What the files of {engine} beside this were made of.")
    if place:
        why = "; ".join(emitter.refuses(plans[0]))
        typer.echo(
            f"plan {place + 1} is the first that {engine} can run; not plan 1: {why}", err=True
        )
    typer.echo(f"saved {', '.join([*files, 'plan.yaml'])} in {where}", err=True)
