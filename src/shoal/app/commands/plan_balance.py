"""``shoal plan balance``: which ranks should compute which sequences of a batch?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.app.show import Format

__all__ = ["balance"]


def balance(
    lengths: Annotated[Path, typer.Argument(help="Lengths of one batch: .txt, .json, .parquet.")],
    model: Annotated[str, typer.Option(help="Name, directory or file.")] = "Llama-2-7b",
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="local, 64xH100, or a file.")
    ] = "64xH100",
    ranks: Annotated[int, typer.Option(help="Ranks of the pool.", min=1)] = 32,
    capacity: Annotated[int, typer.Option(help="Tokens a rank holds in a pass.", min=1)] = 8192,
    column: Annotated[str, typer.Option(help="Key or column of the lengths.")] = "length",
    offload: Annotated[bool, typer.Option("--offload", help="Plan offloading, too.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds for the solver.", min=0.0)] = 5.0,
    svg: Annotated[Path | None, typer.Option(help="Draw what every rank does when.")] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Deal the sequences of a batch out to ranks, in every way that there is, and compare.

    Nothing runs. The step is that of all passes; the sum of the gradients is the same for all and
    not in it. **Examples**

        shoal plan balance lengths.txt

        shoal plan balance lengths.json --model Llama-3-8B -m 64xH100 --ranks 64 --svg step.svg

        shoal plan balance documents.parquet --column tokens --capacity 4096 -o json
    """
    from shoal.app.show import as_json, table
    from shoal.core.errors import PlanError
    from shoal.core.files import write_atomic
    from shoal.core.sizes import human_bytes
    from shoal.cost.sequences import SequenceCost
    from shoal.cost.shapes import resolve
    from shoal.ir import Parallel
    from shoal.machine.described import load
    from shoal.plan.balance import ASSIGNERS
    from shoal.plan.balance.lengths import read_lengths
    from shoal.plan.balance.picture import draw
    from shoal.plan.balance.predicted import predict

    found = read_lengths(lengths, column)
    target, shape = load(machine), resolve(model)
    cost = SequenceCost.on(shape, target, Parallel(dp=ranks))
    plans, refused = [], {}
    own: dict[str, dict[str, Any]] = {
        "flexsp": {"limit_s": limit},
        "bytescale": {"offload": "auto" if offload else "none"},
    }
    for name in ASSIGNERS:
        part = ASSIGNERS.build({"name": name, "capacity_tokens": capacity, **own.get(name, {})})
        try:
            plan = part.assign(found, ranks, cost)
        except PlanError as cause:
            refused[name] = str(cause)
        else:
            plans.append((name, plan, predict(plan, cost)))
    if not plans:
        raise PlanError("; ".join(refused.values()))
    plans.sort(key=lambda one: one[2].step_s)
    if svg is not None:
        write_atomic(svg, draw(plans))
    if output is Format.json:
        as_json(
            {
                "plans": {
                    name: {
                        "step_s": seen.step_s,
                        "idle_share": seen.idle_share,
                        "attention_bytes": seen.exchange_bytes,
                        "micro_steps": len(plan.steps),
                        "largest_group": max(len(step.ranks) for step in plan.steps),
                    }
                    for name, plan, seen in plans
                },
                "refused": refused,
            }
        )
        return
    table(
        f"{len(found):,} sequences of up to {max(found):,} tokens, {sum(found):,} in all, on "
        f"{ranks} ranks of {target.name} with {capacity:,} each",
        ("assigner", "step", "idle", "attention sends", "passes", "groups of"),
        [
            (
                name,
                f"{seen.step_s:.3g} s",
                f"{100 * seen.idle_share:.0f} %",
                human_bytes(int(seen.exchange_bytes)),
                str(len(plan.steps)),
                _span([len(step.ranks) for step in plan.steps]),
            )
            for name, plan, seen in plans
        ],
        numeric=" rrrrr",
    )
    whole = 1 << (ranks.bit_length() - 1)
    if whole != ranks and "flexsp" not in refused:
        typer.echo(f"flexsp: groups are powers of two, so {whole} of {ranks} ranks compute")
    for reason in refused.values():
        typer.echo(f"not possible: {reason}")


def _span(degrees: list[int]) -> str:
    """From the smallest to the largest group."""
    least, most = min(degrees), max(degrees)
    return str(most) if least == most else f"{least} to {most}"
