"""``shoal plan tiles``: which tiles does a kernel get on a machine, and why not larger ones?"""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["tiles"]


def tiles(
    kernel: Annotated[
        str, typer.Argument(help="recurrence, linear, or a file with a system of your own.")
    ] = "recurrence",
    hidden: Annotated[int, typer.Option(help="Units of all heads of a recurrence.")] = 768,
    heads: Annotated[int, typer.Option(help="Heads of a recurrence.")] = 12,
    batch: Annotated[int, typer.Option(help="Sequences; rows of x of a product.")] = 1,
    function: Annotated[str, typer.Option(help="lstm, gru, elman or slstm.")] = "lstm",
    dtype: Annotated[str, typer.Option(help="Of the recurrent matrix: fp64, fp32, bf16.")] = "fp32",
    n: Annotated[int, typer.Option("--n", help="Outputs of a product.")] = 4096,
    k: Annotated[int, typer.Option("--k", help="Inputs of a product.")] = 4096,
    bits: Annotated[int, typer.Option(help="Of a weight of a product.")] = 4,
    group: Annotated[int, typer.Option(help="Weights of a product that share a scale.")] = 128,
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="here, local (as probed), H100, or a file.")
    ] = "here",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="path=value of the facts, such as l2_bytes=1048576."),
    ] = None,
    system: Annotated[
        bool, typer.Option("--system", help="Print the system of constraints, solve nothing.")
    ] = False,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Solve for the tiles of a kernel: integers under the constraints of a machine.

    Where no tiles exist, the constraints that cannot hold together are named.

    **Examples**

        shoal plan tiles recurrence --hidden 768 --heads 12

        shoal plan tiles recurrence --hidden 2048 --heads 1 --machine H100 --dtype bf16

        shoal plan tiles linear --batch 4 --n 11008 --k 4096 --bits 4 --system
    """
    from pathlib import Path

    from shoal.app.show import as_json, table
    from shoal.core.config import parse, resolve
    from shoal.core.errors import ConfigError, require
    from shoal.machine.described import load
    from shoal.plan.constrint import solve
    from shoal.plan.tiles import (
        Facts,
        LinearShape,
        RecurrenceShape,
        facts_of,
        linear_system,
        recurrence_system,
        tiling,
    )
    from shoal.plan.tiles import here as of_this_process

    meanings: dict[str, str] = {}
    if kernel in ("recurrence", "linear"):
        known = of_this_process() if machine == "here" else facts_of(load(machine))
        facts = resolve(Facts, base=known, environment={}, sets=set_ or []).value
        shape: RecurrenceShape | LinearShape
        if kernel == "recurrence":
            sizes = {"fp64": (8, 8), "fp32": (16, 4), "bf16": (16, 2)}
            require(dtype in sizes, "--dtype", dtype, expected=f"one of {', '.join(sizes)}")
            lanes, number_bytes = sizes[dtype]
            shape = parse(
                RecurrenceShape,
                {
                    "hidden": hidden,
                    "heads": heads,
                    "batch": batch,
                    "function": function,
                    "lanes": lanes,
                    "number_bytes": number_bytes,
                },
                where="tiles",
            )
            text = recurrence_system(shape, facts)
        else:
            sides = {"m": batch, "n": n, "k": k, "bits": bits, "group": group}
            shape = parse(LinearShape, sides, where="tiles")
            text = linear_system(shape, facts)
        if not system:
            found = tiling(shape, facts)
            solution, meanings = found.solution, found.meanings
    else:
        path = Path(kernel)
        require(
            path.is_file(),
            "tiles",
            kernel,
            expected="recurrence, linear, or a file",
            error=ConfigError,
        )
        text = path.read_text(encoding="utf-8")
        if not system:
            solution = solve(text)
    if system:
        typer.echo(text.rstrip())
        return
    if output is Format.json:
        as_json(
            {
                "tiles": {name: solution[name] for name in meanings} or dict(solution),
                "objective": solution.objective,
                "nodes": solution.nodes,
                "values": dict(solution),
            }
        )
        return
    shown = meanings or dict.fromkeys(solution, "")
    rows = [(name, f"{solution[name]:,}", meaning) for name, meaning in shown.items()]
    table(f"tiles of {kernel}", ("", "", ""), rows, numeric=" r ")
    best = "solved" if solution.objective is None else "the best there is, proved"
    typer.echo(f"{best} in {solution.nodes} nodes")
