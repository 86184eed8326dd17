"""``shoal plan decode``: how many guesses should a step verify on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["decode"]

_SHOWN = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)


def decode(
    drafters: Annotated[
        list[Path],
        typer.Argument(
            metavar="DRAFTER", help="The directory of a trained drafter; several with --hetero."
        ),
    ],
    costs: Annotated[
        Path | None, typer.Option(help="A table of step costs, as shoal probe decode writes it.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Without a table: the target, to predict its steps.")
    ] = None,
    machine: Annotated[str, typer.Option("--machine", "-m", help="Where it runs.")] = "local",
    precision: Annotated[str, typer.Option(help="Of the prediction: fp32 or bf16.")] = "bf16",
    tree: Annotated[str, typer.Option(help="Which guesses: auto, hardware, chain.")] = "hardware",
    requests: Annotated[int, typer.Option(help="Requests that decode together.")] = 1,
    hetero: Annotated[
        bool, typer.Option("--hetero", help="Rank Dovetail drafters on a device beside a host.")
    ] = False,
    draft_machine: Annotated[
        str | None, typer.Option(help="That device, such as 1xH100; --machine's without.")
    ] = None,
    memory_cap: Annotated[
        str | None, typer.Option(help="Bytes there, such as 3GiB; all it has without.")
    ] = None,
    link_gb_s: Annotated[
        float | None, typer.Option(help="GB/s between both; 8 without.", show_default=False)
    ] = None,
    link_us: Annotated[
        float | None, typer.Option(help="us of a message besides; 20 without.", show_default=False)
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of the longest request; the model's limit without.")
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="The drafter goes on while the target verifies.")
    ] = False,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """How many guesses should a step verify? No torch is needed, and nothing runs.

    The drafter's own calibration says how many tokens a step gives, and the table what it costs.

    **Examples**

        shoal plan decode runs/heads/drafter --costs costs.json

        shoal plan decode runs/prompts/drafter --model shoal-27m --machine laptop --requests 4

        shoal plan decode runs/one/drafter runs/two/drafter --hetero --model DIR --memory-cap 3GiB
    """
    from shoal.app.commands.plan_decode_hetero import Asked
    from shoal.app.commands.plan_decode_hetero import hetero as show_hetero
    from shoal.app.show import as_json, table
    from shoal.core.errors import ConfigError, require
    from shoal.core.parts import Choice
    from shoal.ir import Calibration
    from shoal.machine.described import load
    from shoal.machine.fingerprint import fingerprint
    from shoal.model.drafters.files import read_config
    from shoal.plan.decode import decode_plan, expected_tokens, predicted_costs
    from shoal.plan.decode_measured import find, how_to, sentence
    from shoal.plan.trees.drafting import RowCosts

    beside = {
        "--draft-machine": draft_machine,
        "--memory-cap": memory_cap,
        "--link-gb-s": link_gb_s,
        "--link-us": link_us,
        "--context": context,
        "--overlap": overlap or None,
    }
    if hetero:
        require(requests == 1, "--requests", requests, expected="1 with --hetero")
        require(tree == "hardware", "--tree", tree, expected="none with --hetero: Dovetail's "
                "drafter grows its trees by its own confidence")  # fmt: skip
        show_hetero(
            Asked(
                drafters=drafters,
                model=model,
                costs=costs,
                machine=machine,
                draft_machine=draft_machine,
                precision=precision,
                memory_cap=memory_cap,
                link_gb_s=8.0 if link_gb_s is None else link_gb_s,
                link_us=20.0 if link_us is None else link_us,
                context=context,
                overlap=overlap,
            ),
            output,
        )
        return
    for name, given in beside.items():
        require(given is None, name, given, expected="none without --hetero", hint="give --hetero")
    require(len(drafters) == 1, "drafters", len(drafters), expected="one without --hetero")
    drafter = drafters[0]
    config = read_config(drafter)
    asking = int(config.options.get("ensemble", 1)) if config.name == "ppd" else 0
    expected = expected_tokens(Calibration(config.calibration), Choice(name=tree), asking=asking)
    if costs is not None:
        known = RowCosts.read(costs)
        here = fingerprint()
    elif model is not None:
        planned = load(machine)
        known = predicted_costs(planned, model, precision)
        here = planned.fingerprint
    else:
        raise ConfigError("plan decode: give --costs, or --model to predict what its steps cost")
    paying = decode_plan(expected, known, requests)
    rates, best = paying.table(requests), paying.best(requests)
    kept = find(here, target=config.target)
    measured = () if kept is None else kept.of(config.name)
    rows = sorted({*(rows for rows in _SHOWN if rows <= len(expected)), best + 1})
    if output is Format.json:
        as_json(
            {
                "drafter": config.name,
                "chosen_rows": best + 1,
                "requests": requests,
                "falls": list(known.falls),
                "measured": [one.model_dump() for one in measured],
                "rows": {
                    str(count): dict(
                        zip(("tokens", "seconds", "over_plain"), rates[count - 1], strict=True)
                    )
                    for count in rows
                },
            }
        )
        return
    shown = [
        (
            f"{count}{' *' if count == best + 1 else ''}",
            f"{rates[count - 1][0]:.2f}",
            f"{1e3 * rates[count - 1][1]:.2f} ms",
            f"{rates[count - 1][2]:.2f}x",
        )
        for count in rows
    ]
    title = f"{config.name}, {requests} request{'s' if requests > 1 else ''}"
    table(title, ("rows", "tokens", "step", "over plain"), shown, numeric="rrrr")
    if known.falls:
        falls = ", ".join(map(str, known.falls))
        typer.echo(f"note: steps of {falls} rows are given less time than steps of fewer rows")
    if best:
        tokens, _, gain = rates[best]
        typer.echo(f"N* = {best + 1} rows: {tokens:.2f} tokens a step, {gain:.2f}x plain decoding")
    else:
        typer.echo("N* = 1: plain decoding is as fast as any tree; leave speculative out")
    if measured:
        typer.echo(sentence(config.name, measured))
    else:
        typer.echo(
            "no whole answers were measured on this machine; to see what pays: "
            + how_to(config.name, model or "TARGET", str(drafter))
        )
