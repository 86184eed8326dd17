"""``shoal check``: does a parallel training step equal one process?"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

__all__ = ["check"]

_SHOWN = 10


class _Dtype(StrEnum):
    float64 = "float64"
    float32 = "float32"


class _Loss(StrEnum):
    mean = "mean"
    sum = "sum"
    same = "same"


def check(
    file: Annotated[
        str,
        typer.Argument(help="A Python file, or a module's dotted name; it is executed."),
    ],
    ranks: Annotated[
        int | None, typer.Option(help="Processes; without it as many as the mesh has.", min=2)
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Axes, slowest first, such as dp=2,tp=2.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps to compare.", min=1)] = 3,
    dtype: Annotated[_Dtype, typer.Option(help="Precision of everything.")] = _Dtype.float64,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest relative error; 1e-9 in float64, 2e-5 in float32."),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(
            help="Smallest scale of an error; a hundredth of the largest entry of its kind.",
            min=0,
        ),
    ] = None,
    loss: Annotated[
        _Loss | None, typer.Option(help="How the ranks' losses make the whole one.")
    ] = None,
    ragged: Annotated[
        bool, typer.Option("--ragged", help="Deal the rows out unevenly over the ranks.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of model and batches.", min=0)] = 0,
    timeout: Annotated[
        float, typer.Option(help="Seconds without progress after which a rank hangs.", min=1)
    ] = 120.0,
    json_: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the headline only.")] = False,
) -> None:
    """Prove that a parallel training step equals one process, or name what does not.

    FILE is a program of yours and is executed, as `python FILE` would. It defines
    `model()`, `batch(step)`, `loss(model, batch)` and `parallelize(model, mesh)`, with DDP,
    FSDP2, tensor parallelism or whatever else. It runs in one process, then over gloo on several;
    loss, every gradient, the updated parameters and the buffers are compared. The status
    is 0 when all are equal, 1 when one differs, 2 when it cannot be told.

    **Examples**

        shoal check examples/check/ddp.py --ranks 4

        shoal check examples/check/tensor_parallel.py --mesh dp=2,tp=2 --json
    """
    from shoal.app.show import WorkBar, as_json, table
    from shoal.claims.check.protocols import CheckSettings, parse_mesh
    from shoal.claims.check.report import headline, row_cells, summary
    from shoal.claims.check.run import check as run
    from shoal.core.config import parse

    raw = {
        "file": file,
        "ranks": ranks,
        "mesh": None if mesh is None else parse_mesh(mesh),
        "steps": steps,
        "dtype": dtype.value,
        "tolerance": tolerance,
        "atol": atol,
        "loss_over_ranks": None if loss is None else loss.value,
        "ragged": ragged,
        "seed": seed,
        "timeout_s": timeout,
    }
    settings = parse(CheckSettings, raw, where="")
    with WorkBar("check", quiet=quiet or json_) as bar:
        verdict = run(settings, lambda text: bar(0, 0, text))
    if json_:
        as_json(verdict.model_dump(mode="json"))
    else:
        typer.echo(headline(verdict))
        if not quiet:
            for finding in verdict.findings:
                typer.echo(f"  {finding.text}")
            for line in summary(verdict):
                typer.echo(line)
            rows = [row_cells(row, settings.limit) for row in verdict.rows[:_SHOWN]]
            columns = ("step", "kind", "name", "relative error", "rank", "")
            table("", columns, rows, numeric="r  rr")
            hidden = len(verdict.rows) - _SHOWN
            if hidden > 0:
                typer.echo(f"and {hidden} more; --json has all")
            for note in verdict.notes:
                typer.echo(f"note: {note}")
    if not verdict.equal:
        raise typer.Exit(1)
