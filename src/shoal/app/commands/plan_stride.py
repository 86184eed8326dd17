"""``shoal plan stride``: which sub-groups of an optimizer's state does the device update?"""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["stride"]


def stride(
    host: Annotated[float, typer.Option(help="Parameters that the host updates, in a second.")],
    device: Annotated[float, typer.Option(help="Parameters that the device updates.")],
    link: Annotated[float, typer.Option(help="fp32 words of the link, each way, in a second.")],
    convert: Annotated[
        float, typer.Option(help="Parameters that the host makes low-precision ones of.")
    ] = 8e9,
    parameters: Annotated[float, typer.Option(help="Parameters of this rank.")] = 2e9,
    sub_group: Annotated[float, typer.Option(help="Parameters of a sub-group.")] = 1e8,
    residents: Annotated[int, typer.Option(help="Sub-groups that stay on the device.")] = 0,
    half_duplex: Annotated[bool, typer.Option(help="One way at a time on the link.")] = False,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Which sub-groups of an optimizer's state on the host should the device update?

    Every stride is played over host, device and link (Deep Optimizer States). **Examples**

        shoal plan stride --host 1.5e9 --device 25e9 --link 12e9

        shoal plan stride --host 1.5e9 --device 25e9 --link 12e9 --residents 4 -o json
    """
    from shoal.app.show import as_json, table
    from shoal.core.errors import require
    from shoal.plan.stride import HOST_ONLY, Rates, choose, steady_stride

    require(parameters >= 1, "--parameters", parameters, expected="at least 1")
    require(
        sub_group >= 1 and parameters / sub_group <= 2000,
        "--sub-group",
        sub_group,
        expected="at least 1, and at most 2,000 of them in all",
    )
    for name, rate in (("host", host), ("device", device), ("link", link), ("convert", convert)):
        require(0 < rate < 1e18, f"--{name}", rate, expected="above 0")
    rates = Rates(host=host, device=device, convert=convert, link=link, duplex=not half_duplex)
    whole, size = int(parameters), int(sub_group)
    sizes = [min(size, whole - at) for at in range(0, whole, size)]
    best, played = choose(rates, sizes, residents=residents)
    alone = next(one for one in played if one.pattern.stride == HOST_ONLY)
    ranked = sorted(played, key=lambda one: one.seconds)
    if output is Format.json:
        as_json(
            {
                "chosen": best.model_dump(mode="json"),
                "host_only_s": alone.seconds,
                "stride_of_the_formula": steady_stride(rates, size),
                "played": [one.model_dump(mode="json") for one in ranked],
            }
        )
        return
    rows = [
        (
            one.pattern.told(),
            f"{1e3 * one.seconds:,.1f} ms",
            f"{alone.seconds / one.seconds:.2f}x",
            *(f"{100 * one.busy_s.get(name, 0) / one.flushed_s:.0f} %" for name in _RESOURCES),
        )
        for one in ranked[:8]
    ]
    columns = ("who updates", "update", "over host only", *(f"{name} busy" for name in _RESOURCES))
    title = f"{whole:,} parameters in {len(sizes)} sub-groups"
    table(title, columns, rows, numeric=" rrrrrr")
    typer.echo(
        f"{best.pattern.told()}: {alone.seconds / best.seconds:.2f}x the host alone; the formula "
        f"1 + ceil(t_device / t_host) says {steady_stride(rates, size)}"
    )


_RESOURCES = ("host", "device", "in", "out")
