"""``shoal plan parscale``: what are parallel streams of one model worth, and what do they cost?"""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["parscale"]


def parscale(
    model: Annotated[str, typer.Argument(help="A model's name, directory or shape file.")] = (
        "Qwen2.5-1.5B"
    ),
    params: Annotated[
        float | None, typer.Option(help="Parameters, such as 1.6e9; the model's, if not given.")
    ] = None,
    corpus: Annotated[str, typer.Option(help="Whose published losses: stack or pile.")] = "pile",
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="local, 1xH100, or a file.")
    ] = "1xH100",
    batch: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 1,
    context: Annotated[int, typer.Option(help="Tokens of each.", min=1)] = 1024,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """What are P streams of one model worth, and what would the dense model of equal loss cost?

    The law is fitted to the published losses of 24 models. Nothing runs. **Examples**

        shoal plan parscale --params 1.6e9

        shoal plan parscale Qwen3-8B --corpus stack --batch 8 -m 1xRTX-4090 -o json
    """
    from shoal.app.show import as_json, table
    from shoal.core.errors import require
    from shoal.core.sizes import human_bytes
    from shoal.cost.parscale import PUBLISHED, equal_loss, fit_parscale
    from shoal.cost.shapes import resolve
    from shoal.machine.described import load

    require(corpus in PUBLISHED, "--corpus", corpus, expected=f"one of {', '.join(PUBLISHED)}")
    require(params is None or params > 0, "--params", params, expected="more than 0")
    law = fit_parscale(PUBLISHED[corpus])
    shape, target = resolve(model), load(machine)
    rows = equal_loss(law, shape, target, params=params, batch=batch, context=context)
    if output is Format.json:
        as_json({"law": law.model_dump(), "rows": [row.model_dump() for row in rows]})
        return

    def times(saved: float | None) -> str:
        return "" if saved is None else f"{saved:.1f}x less"

    table(
        f"P streams and the dense model of equal loss: batch {batch}, {context} tokens each, "
        f"{target.name}",
        ("P", "loss", "as good as", "memory", "dense", "increase", "step", "dense", "increase"),
        [
            (
                str(row.streams),
                f"{row.loss:.4f}",
                f"{row.dense_params / 1e9:.2f}B",
                human_bytes(int(row.memory_bytes)),
                human_bytes(int(row.dense_memory_bytes)),
                times(row.memory_saved),
                f"{row.step_s * 1e3:.2f} ms",
                f"{row.dense_step_s * 1e3:.2f} ms",
                times(row.latency_saved),
            )
            for row in rows
        ],
        numeric="rrrrrrrrr",
    )
    typer.echo(
        f"law of {corpus}: L = {law.floor:.4f} + ({law.scale:.4g} * 1e9 / (N * ({law.k:.3f} ln P + "
        f"1))) ^ {law.exponent:.4f}, R2 {law.r2:.4f}"
    )
