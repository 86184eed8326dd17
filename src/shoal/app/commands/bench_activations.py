"""``shoal bench activations``: what a step saves, kept, computed again, or sent to a disk."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.app.show import Anyway, Format, Output, Quiet


def activations(
    model: Annotated[str, typer.Option(help="A model of the zoo or a shipped shape.")] = "shoal-4m",
    sequences: Annotated[int, typer.Option(help="Sequences per step.", min=1)] = 4,
    length: Annotated[int, typer.Option(help="Tokens per sequence.", min=1)] = 256,
    path: Annotated[str, typer.Option(help="Directory on the disk.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Three rounds.")] = False,
    anyway: Anyway = False,
    quiet: Quiet = False,
    output: Output = Format.text,
) -> None:
    """Compare keeping what the forward pass saves with computing it again and with a disk.

    All three take turns on the same batch. Memory is what a step makes, apart from weights and
    gradients; the disk's life is that of one of 600 TB written.

    **Examples**

        shoal bench activations

        shoal bench activations --model shoal-16m --sequences 8 --path /mnt/nvme --quick
    """
    import dataclasses

    from shoal.app.show import as_json, table, wait_until_quiet
    from shoal.claims.bench.activations import compare
    from shoal.core.sizes import human_bytes
    from shoal.memory.activations.ssdtrain import SSDTrain
    from shoal.train.zoo import config

    wait_until_quiet(anyway=anyway, quiet=quiet)
    rows = compare(
        config(model),
        sequences=sequences,
        length=length,
        disk=SSDTrain(path=path),
        rounds=3 if quick else 9,
    )
    if output is Format.json:
        as_json([dataclasses.asdict(row) for row in rows])
        return
    kept = rows[0]
    table(
        "activations",
        ("", "peak", "of keep", "step", "of keep", "written", "waited", "disk's life"),
        [
            (
                row.name,
                human_bytes(row.peak_bytes),
                f"{row.peak_bytes / kept.peak_bytes:.2f}",
                f"{1e3 * row.step_s:.0f} ms",
                f"{row.step_s / kept.step_s:.2f}",
                human_bytes(row.written_bytes) if row.written_bytes else "",
                f"{1e3 * row.stall_s:.0f} ms" if row.written_bytes else "",
                f"{row.years:.2g} years" if row.written_bytes else "",
            )
            for row in rows
        ],
        numeric=" rrrrrrr",
    )
