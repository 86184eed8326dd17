"""``shoal probe``: what can this machine do?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.show import Format, Output

if TYPE_CHECKING:
    from shoal.ir import Machine

__all__ = ["probe", "show_machine"]


def probe(
    sweep: Annotated[
        str | None,
        typer.Argument(
            help="gemm: sweep matrix products for the learned predictor; decode: time the steps "
            "of a server that guesses."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full/--fast", help="Every size, more repeats.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where to save; the machine called `local` by default.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a noisy machine.")] = False,
    show: Annotated[
        str | None, typer.Option(help="Show a machine by name or file; probe nothing.")
    ] = None,
    compare: Annotated[
        list[str] | None, typer.Option(help="Give twice: show two machines side by side.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the roofline as SVG.")] = None,
    output: Output = Format.text,
    budget: Annotated[float, typer.Option(help="Of gemm: seconds of the sweep.")] = 180.0,
    watts: Annotated[
        float, typer.Option(help="Of gemm: draw of this host under load, if it has no counters.")
    ] = 0.0,
    importance: Annotated[
        bool, typer.Option("--importance", help="Of gemm: say which features matter.")
    ] = False,
    job: Annotated[
        Path | None, typer.Option(help="Of decode: the serving job, with speculative.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure this machine and save it, or show a machine that is known.

    **Examples**

        shoal probe                                # about half a minute

        shoal probe --full --picture roofline.svg

        shoal probe --show 16xH100

        shoal probe --compare local --compare 8xH100

        shoal probe gemm --budget 180              # goes on where it stopped

        shoal probe decode --job serve.yaml --out costs.json
    """
    from shoal.app.show import WorkBar, as_json, table
    from shoal.core.errors import ConfigError
    from shoal.core.files import shoal_home, write_atomic
    from shoal.machine.described import load

    if sweep == "decode":
        from shoal.app.commands.probe_decode import measure as measure_decode

        measure_decode(job, out, json=output is Format.json)
        return
    if sweep is not None:
        from shoal.app.commands.probe_gemm import sweep as sweep_products
        from shoal.core.errors import require

        require(sweep == "gemm", "probe", sweep, expected="gemm, decode, or nothing")
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
        machine = load(show)
    else:
        from shoal.machine.probing import probe as measure

        with WorkBar("probing", quiet=quiet) as bar:
            machine = measure(fast=not full, strict=strict, progress=bar)
        path = out or shoal_home() / "machine.yaml"
        machine.save(path, header="Measured by shoal probe.")
        typer.echo(f"saved {path}", err=output is Format.json)
    if picture is not None:
        from shoal.machine.roofline import roofline_svg

        write_atomic(picture, roofline_svg(machine))
        typer.echo(f"drew {picture}", err=output is Format.json)
    if output is Format.json:
        as_json(machine.model_dump(mode="json", exclude_none=True))
    else:
        show_machine(machine)


def show_machine(machine: Machine) -> None:
    """Print what a planner reads of a machine."""
    from shoal.app.show import table
    from shoal.core.sizes import human_bytes

    device = machine.device
    rows: list[tuple[str, str]] = [
        ("machine", f"{machine.name} ({machine.provenance})"),
        ("devices", f"{machine.num_devices} x {device.name}"),
    ]
    if device.num_cores:
        rows.append(("cores", str(device.num_cores)))
    for dtype, rate in device.peak_flops.items():
        reached = device.matmul_flops.get(dtype)
        share = f", matrix products reach {100 * reached / rate:.0f} %" if reached else ""
        rows.append((f"peak {dtype}", f"{rate / 1e12:.3g} TFLOP/s{share}"))
    for dtype, rate in device.matmul_flops.items():
        if dtype not in device.peak_flops:
            rows.append((f"matrix product {dtype}", f"{rate / 1e12:.3g} TFLOP/s"))
    for tier in device.memory:
        speed = f", {tier.read_bandwidth / 1e9:.3g} GB/s" if tier.read_bandwidth else ""
        delay = f", {tier.latency_s * 1e9:.3g} ns" if tier.latency_s else ""
        rows.append((tier.name, f"{human_bytes(tier.capacity_bytes)}{speed}{delay}"))
    for link in machine.links:
        rows.append(
            (
                f"{link.scope} link",
                f"{link.bandwidth / 1e9:.3g} GB/s, {link.latency_s * 1e6:.3g} us",
            )
        )
    if machine.noise is not None:
        rows.append(("noise", f"+-{100 * machine.noise:.0f} %"))
    table("", ("", ""), rows)
    if "noise" in machine.sources:
        typer.echo(f"noisy: {machine.sources['noise']}")
    doubtful = [m for m in machine.measurements if not m.plausible]
    for measurement in doubtful:
        typer.echo(f"doubtful: {measurement.probe} {measurement.quantity}: {measurement.note}")
