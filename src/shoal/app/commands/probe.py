"""``shoal probe``: what can this machine do?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format, Output


def probe(
    sweep: Annotated[
        str | None,
        typer.Argument(
            help="gemm: sweep matrix products for the learned predictor; gpu: time serving "
            "kernels on the GPU of this machine; decode: time steps of speculative decoding."
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full/--fast", help="Measure every size with more repeats.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Output file. [default: the machine `local`]")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on a noisy machine.")] = False,
    show: Annotated[
        str | None,
        typer.Option(
            "--show", "--machine", "-m", help="Show a machine, by name or file, without probing."
        ),
    ] = None,
    compare: Annotated[
        list[str] | None, typer.Option(help="Compare two machines; give it twice.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Plot the roofline to this SVG file.")
    ] = None,
    output: Output = Format.text,
    budget: Annotated[float, typer.Option(help="gemm, gpu: seconds of the sweep.")] = 180.0,
    watts: Annotated[
        float, typer.Option(help="gemm: power of this host under load, if it has no counters.")
    ] = 0.0,
    importance: Annotated[
        bool, typer.Option("--importance", help="gemm: show which features matter.")
    ] = False,
    job: Annotated[
        Path | None, typer.Option(help="decode: a serving job with speculative decoding.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure this machine and save the result, or show a described machine.

    **Examples**

        shoal probe                                # about half a minute

        shoal probe --full --picture roofline.svg

        shoal probe --show 16xH100

        shoal probe --compare local --compare 8xH100

        shoal probe gemm --budget 180              # continues where it stopped

        shoal probe gpu --budget 300               # serving plans then use these kernel times

        shoal probe decode --job serve.yaml --out costs.json
    """
    from shoal import api
    from shoal.app.show import WorkBar, as_json, show_blocks, table
    from shoal.core.errors import ConfigError
    from shoal.core.files import write_atomic
    from shoal.machine.described import load
    from shoal.machine.probing import saved_path
    from shoal.machine.table import tables

    if sweep == "decode":
        from shoal.app.commands.probe_decode import measure as measure_decode

        measure_decode(job, out, json=output is Format.json)
        return
    if sweep == "gpu":
        from shoal.app.commands.probe_gpu import sweep as sweep_card

        sweep_card(budget, out, json=output is Format.json, quiet=quiet)
        return
    if sweep is not None:
        from shoal.app.commands.probe_gemm import sweep as sweep_products
        from shoal.core.errors import require

        require(sweep == "gemm", "probe", sweep, expected="gemm, gpu, decode, or nothing")
        sweep_products(
            budget,
            out,
            watts,
            importance=importance,
            json=output is Format.json,
            quiet=quiet,
        )
        return
    if compare:
        from shoal.machine.comparing import compare as side_by_side

        if len(compare) != 2:
            raise ConfigError("--compare: give it twice, such as --compare local --compare 8xH100")
        rows = side_by_side(load(compare[0]), load(compare[1]))
        table("", ("", compare[0], compare[1], "ratio"), rows, numeric=" rrr")
        return
    if show is not None:
        described = load(show)
    else:
        with WorkBar("probing", quiet=quiet) as bar:
            described = api.probe(fast=not full, strict=strict, save=out or True, progress=bar)
        typer.echo(f"saved {out or saved_path()}", err=output is Format.json)
    if picture is not None:
        from shoal.machine.roofline import roofline_svg

        write_atomic(picture, roofline_svg(described))
        typer.echo(f"drew {picture}", err=output is Format.json)
    if output is Format.json:
        as_json(described.model_dump(mode="json", exclude_none=True))
    else:
        show_blocks(tables(described))
