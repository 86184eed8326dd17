"""``shoal score``: how good were the predictions so far?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.app.show import Format, Output


def score(
    output: Output = Format.text,
    last: Annotated[int, typer.Option(help="Number of newest rows to show.", min=1)] = 20,
    all_: Annotated[
        bool,
        typer.Option(
            "--all", help="Also show rows that are excluded from the errors, with reasons."
        ),
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Judge again which past rows count.")
    ] = False,
    import_: Annotated[
        Path | None,
        typer.Option("--import", help="Import and score the log of another engine."),
    ] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="auto, torchtitan, megatron, deepspeed, accelerate, vllm, sglang, llamacpp, "
            "tensorboard or wandb.",
        ),
    ] = "auto",
    plan: Annotated[
        Path | None, typer.Option(help="The plan that was run; without it nothing is scored.")
    ] = None,
    published: Annotated[
        str | None,
        typer.Option(
            help="Predict published runs: training, serving, closed-loop or a CSV file; largest "
            "errors first."
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Fit corrections of predicted times to the runs in the score."
        ),
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine", "-m", help="With --calibrate: only this machine. [default: all with runs]"
        ),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="With --calibrate: remove the corrections.")
    ] = False,
) -> None:
    """Show past predictions and measurements, and the errors.

    A run counts once, at its end, if it followed the plan that was priced. `--all` shows excluded
    rows with the reason; `--repair` judges old rows again by the current rules.

    `--import` reads the log of another engine; with `--plan` it is compared with the prediction and
    added to the score. `--calibrate` corrects later predictions by measured runs; one run is
    enough.

    **Examples**

        shoal score

        shoal score --all

        shoal score -o json --last 1000

        shoal score --import train.log --plan launch-torchtitan/plan.yaml

        shoal score --published training

        shoal score --published my-runs.csv

        shoal score --calibrate

        shoal score --calibrate --forget
    """
    from shoal import api
    from shoal.app.show import as_json, show_blocks
    from shoal.core.errors import require

    for flag, given in (("--machine", machine is not None), ("--forget", forget)):
        require(calibrate or not given, flag, machine or True, expected="--calibrate beside it")
    require(
        not calibrate or import_ is None,
        "--calibrate",
        True,
        expected="a separate command, after --import",
    )
    values: Any
    if published is not None:
        from shoal.cost.published.boards import board_of, board_results, board_tables

        board = board_of(published)
        values, blocks, most = board_results(board), board_tables(board, last), None
    elif import_ is not None:
        log = api.import_log(import_, format=format_, plan=plan)
        values, blocks, most = log.figures(), log.tables(), None
    elif calibrate:
        from shoal.app.commands.calibrating import show_calibration

        show_calibration(machine, forget=forget, output=output)
        return
    else:
        store = api.score()
        if repair:
            gone, again = store.repair()
            typer.echo(f"judged again: {gone} rows excluded, {again} rows included", err=True)
        values, blocks, most = store.figures(last), store.tables(last=last, everything=all_), 80
    if output is Format.json:
        as_json(values)
    else:
        show_blocks(blocks, most=most)
