"""``shoal demo``: the whole line, from a probe to a model that answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Output directory.")] = Path("demo"),
    minutes: Annotated[float, typer.Option(help="Minutes of training.", min=0.05)] = 3.0,
    ranks: Annotated[int, typer.Option(help="Ranks.", min=1, max=64)] = 2,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="path=value of the training job.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Probe, plan, train, lose a rank, resume, generate, serve, talk, gallery.

    **Examples**

        shoal demo

        shoal demo --minutes 20

        shoal demo --minutes 1 --set evaluation.final=false
    """
    from shoal.app.demo import run_demo
    from shoal.app.show import TrainingBar, WorkBar

    run_demo(
        directory,
        minutes=minutes,
        ranks=ranks,
        say=typer.echo,
        work=lambda title: WorkBar(title, quiet=quiet),
        training=lambda: TrainingBar(quiet=quiet),
        sets=set_ or [],
    )
