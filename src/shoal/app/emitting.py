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
    """Write the files of ``engine`` for the best plan that it can run, and that plan beside them.

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
    from shoal.plan.emit.priced import chosen_for

    emitter = EMITTERS.build(engine, where="--emit")
    place, chosen = chosen_for(plans, emitter)
    files = emitter.emit(chosen)
    where = directory or Path(f"launch-{engine}")
    for name, text in files.items():
        write_atomic(where / name, text)
    chosen.save(where / "plan.yaml", header=f"What the files of {engine} beside this were made of.")
    if place:
        refused = "; ".join(emitter.refuses(plans[0]))
        why = f"plan 1 it cannot: {refused}" if refused else "it runs it faster than plan 1"
        typer.echo(f"plan {place + 1} is what {engine} runs best; {why}", err=True)
    typer.echo(f"saved {', '.join([*files, 'plan.yaml'])} in {where}", err=True)
