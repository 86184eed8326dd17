"""``shoal check``: does a parallel training step equal one process?"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from shoal.app.show import Format, Output


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
        typer.Argument(help="A Python file or a module's dotted name, which is executed."),
    ],
    ranks: Annotated[
        int | None, typer.Option(help="Number of processes. [default: size of the mesh]", min=2)
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Mesh axes, slowest first, such as dp=2,tp=2.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps to compare.", min=1)] = 3,
    dtype: Annotated[_Dtype, typer.Option(help="Precision of model and data.")] = _Dtype.float64,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest relative error; 1e-9 in float64, 2e-5 in float32."),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(
            help="Smallest scale of an error. [default: 1/100 of the largest entry of its kind]",
            min=0,
        ),
    ] = None,
    loss: Annotated[
        _Loss | None, typer.Option(help="How the losses of the ranks are combined.")
    ] = None,
    ragged: Annotated[
        bool, typer.Option("--ragged", help="Distribute rows unevenly over the ranks.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of model and batches.", min=0)] = 0,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds without progress after which a rank counts as hanging.", min=1),
    ] = 120.0,
    output: Output = Format.text,
    json_: Annotated[bool, typer.Option("--json", hidden=True)] = False,
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

        shoal check examples/check/tensor_parallel.py --mesh dp=2,tp=2 -o json
    """
    from shoal import api
    from shoal.app.show import WorkBar, as_json, show_blocks
    from shoal.claims.check.report import headline, tables

    if json_:
        typer.echo("--json: deprecated; use -o json", err=True)
        output = Format.json
    with WorkBar("check", quiet=quiet or output is Format.json) as bar:
        verdict = api.check(
            file,
            progress=bar,
            ranks=ranks,
            mesh=mesh,
            steps=steps,
            dtype=dtype.value,
            tolerance=tolerance,
            atol=atol,
            loss_over_ranks=None if loss is None else loss.value,
            ragged=ragged,
            seed=seed,
            timeout_s=timeout,
        )
    if output is Format.json:
        as_json(verdict.model_dump(mode="json"))
    elif quiet:
        typer.echo(headline(verdict))
    else:
        show_blocks(tables(verdict))
    if not verdict.equal:
        raise typer.Exit(1)
