"""``shoal probe``: what can this machine do?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format, Output, check_endings


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
    from shoal.core.errors import ConfigError, require
    from shoal.core.files import write_atomic
    from shoal.machine.described import load
    from shoal.machine.probing import saved_path
    from shoal.machine.table import tables

    check_endings("--picture", [picture], ".svg")
    json = output is Format.json

    def saved(*places: object) -> None:
        for place in places:
            typer.echo(f"saved {place}", err=json)

    if sweep == "decode":
        if job is None:
            raise ConfigError(
                "probe decode: give --job, the YAML of a serving job with speculative"
            )
        costs = api.probe_decode(job, out=out or "costs.json")
        saved(out or "costs.json")
        if json:
            as_json({"rows": costs.rows, "seconds": costs.seconds_of, "draft_s": costs.draft_s})
        else:
            show_blocks(costs.tables())
        return
    if sweep == "gpu":
        with WorkBar("kernels", quiet=quiet) as bar:
            timed = api.probe_gpu(budget_s=budget, out=out, progress=bar)
        saved(timed.result.path)
        if json:
            as_json(timed.as_json())
        else:
            show_blocks(timed.tables())
        return
    if sweep is not None:
        require(sweep == "gemm", "probe", sweep, expected="gemm, gpu, decode, or nothing")
        with WorkBar("sweeping", quiet=quiet) as bar:
            products = api.probe_gemm(budget_s=budget, out=out, watts=watts, progress=bar)
        saved(products.table, products.file)
        ranked = products.importance() if importance else {}
        if json:
            as_json({**products.as_json(), "importance": ranked})
            return
        show_blocks(products.tables())
        if ranked:
            rises = [(name, f"{rise:.3f}") for name, rise in list(ranked.items())[:10]]
            title = "feature importance: rise of the error in log seconds"
            table(title, ("", ""), rises, numeric=" r")
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
        saved(out or saved_path())
    if picture is not None:
        from shoal.machine.roofline import roofline_svg

        write_atomic(picture, roofline_svg(described))
        typer.echo(f"drew {picture}", err=json)
    if json:
        as_json(described.model_dump(mode="json", exclude_none=True))
    else:
        show_blocks(tables(described))
