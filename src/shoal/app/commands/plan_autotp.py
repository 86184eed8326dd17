"""``shoal plan autotp``: how would this model be split by tensor parallelism?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["autotp"]


def autotp(
    config: Annotated[Path, typer.Argument(help="A config.json of transformers, or a directory.")],
    tp: Annotated[int, typer.Option(help="Ranks that share the model.", min=2)] = 2,
    length: Annotated[int, typer.Option(help="Tokens of the example.", min=2)] = 8,
    fallback: Annotated[
        str, typer.Option(help="What cannot be traced as a whole: modules or refuse.")
    ] = "modules",
    dtensor: Annotated[
        Path | None, typer.Option(help="Write module -> style as JSON, as tp_plan of transformers.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the plan as YAML.")] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Find a tensor-parallel plan of a model from its graph, whatever its author called things.

    The model is built on the meta device, so weights are neither read nor made.

    **Examples**

        shoal plan autotp config.json

        shoal plan autotp llama-3-70b/ --tp 8 --dtensor tp_plan.json

        shoal plan autotp config.json --tp 4 -o json
    """
    from shoal.core.errors import ConfigError, require

    require(fallback in ("modules", "refuse"), "--fallback", fallback, expected="modules or refuse")
    from shoal.app.autotp import found, show

    plan = found(config, tp=tp, length=length, fallback=fallback)
    if out is not None:
        plan.save(out, header="A tensor-parallel plan, by `shoal plan autotp`.")
        typer.echo(f"saved {out}", err=True)
    if dtensor is not None:
        from shoal.core.files import write_json

        write_json(dtensor, plan.dtensor(), error=ConfigError)
        typer.echo(f"wrote {dtensor}", err=True)
    if output is Format.json:
        from shoal.app.show import as_json

        as_json({**plan.model_dump(mode="json"), "dtensor": plan.dtensor()})
    else:
        show(plan)
