"""``shoal plan sbp``: which placement should every tensor of a module have?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["sbp"]


def sbp(
    file: Annotated[Path, typer.Argument(help="A Python file; it is executed.")],
    mesh: Annotated[str, typer.Option("--mesh", help="Ranks of each axis, such as 4 or 2x4.")],
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", help="TENSOR=PLACEMENT, such as x=S(0),B; more than once."),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Bytes of a rank; a plan that needs more is none.")
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="Operations a second of a rank; 4e14.")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Bytes a second that a rank sends; 5e10.")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(help="Seconds of a collective besides its bytes; 5e-6.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Show every operation, not weights and boxing alone.")
    ] = False,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Choose split, broadcast or partial for every tensor of a module, and what is boxed.

    FILE is a program of yours and is executed. It defines `build()`, which returns a
    `torch.nn.Module` and the shapes of its inputs, such as `return Mlp(), [(8, 128, 512)]`;
    instead of a shape it may give a tensor, such as one of token numbers. Everything that
    `--show` names can be pinned; the result is pinned to B if you do not.

    **Examples**

        shoal plan sbp model.py --mesh 2x4 --show

        shoal plan sbp model.py --mesh 4 --pin x=B --pin down=B --memory 2e9
    """
    from shoal.app.show import as_json, table
    from shoal.core.config import parse
    from shoal.core.errors import PlanError
    from shoal.core.sizes import human_bytes
    from shoal.ir.placement import parse_mesh
    from shoal.parallel.build import load
    from shoal.plan.sbp import Rates, place

    pins: dict[str, str] = {}
    for word in pin or []:
        name, separator, placement = word.partition("=")
        if not separator:
            raise PlanError(f"--pin {word}: expected TENSOR=PLACEMENT, such as x=S(0),B")
        pins[name.strip()] = placement.strip()
    given = {"flops_per_s": flops, "bytes_per_s": bandwidth, "latency_s": latency}
    raw = {key: value for key, value in given.items() if value is not None}
    rates = parse(Rates, raw, where="rates")
    traced, sizes = load(file), parse_mesh(mesh)
    pins.setdefault(traced.result, ",".join("B" * len(sizes)))
    plan = place(traced.graph, sizes, pins=pins, rates=rates, memory_limit=memory)
    if output is Format.json:
        as_json(plan.model_dump(mode="json"))
        return
    weights = [
        (name, "x".join(map(str, tensor.shape)), plan.placements[name])
        for name, tensor in traced.weights.items()
    ]
    table("weights", ("weight", "shape", "placement"), weights)
    if show:
        rows = [
            (op.name, op.kind, "; ".join(plan.inputs[op.name]), plan.placements[op.name])
            for op in traced.graph.ops
        ]
        table("operations", ("result", "operation", "takes", "placement"), rows)
    moves = [
        (move.tensor, move.source, move.target, ", ".join(move.steps), human_bytes(move.bytes))
        for move in plan.moves
        if show or move.bytes
    ]
    columns = ("tensor", "from", "to", "steps", "bytes of all ranks")
    table("boxing", columns, moves, numeric="    r")
    inputs = ", ".join(f"{name} {plan.placements[name]}" for name in traced.inputs)
    typer.echo(f"inputs: {inputs}; result: {traced.result} {plan.placements[traced.result]}")
    typer.echo(
        f"{1e3 * plan.seconds:,.4g} ms forward, {human_bytes(plan.boxing_bytes)} sent, "
        f"{human_bytes(plan.memory_bytes)} of memory on the fullest rank; by {plan.method}"
    )
