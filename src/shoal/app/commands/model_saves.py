"""``shoal model inspect``, ``stalls`` and ``timeline``: a checkpoint, and the saves of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.app.show import Format, Output

if TYPE_CHECKING:
    from shoal.checkpoint.history import SaveRecord

_Output = Output
_Run = Annotated[Path, typer.Argument(help="Directory of a run.")]
_Svg = Annotated[Path | None, typer.Option("--svg", help="Also write the picture to this file.")]


def inspect(
    directory: Annotated[
        str,
        typer.Argument(
            help="A run, a checkpoint, a model of any format or its id; or a store's address."
        ),
    ],
    step: Annotated[int | None, typer.Option(help="Step of the run. [default: the newest]")] = None,
    output: _Output = Format.text,
) -> None:
    """Say what a checkpoint is: its step, who saved it, and what lies in which file.

    **Examples**

        shoal model inspect runs/run

        shoal model inspect s3://bucket/run --step 100 -o json
    """
    from shoal.app.show import as_json, table
    from shoal.checkpoint.inspect import summary
    from shoal.checkpoint.remote import path_or_address
    from shoal.core.hub import local_model
    from shoal.core.sizes import human_bytes

    result = summary(path_or_address(local_model(directory)), step)
    if output is Format.json:
        as_json({**result.model_dump(mode="json"), "balance": result.balance})
        return
    rows: list[tuple[str, object]] = [("kind", result.kind), ("path", result.path)]
    if result.step is not None:
        rows += [
            ("step", result.step),
            ("steps", ", ".join(map(str, result.steps)) or result.step),
            ("saved by", "one rank" if result.world == 1 else f"{result.world} ranks"),
            ("format version", result.version),
        ]
    rows += [
        (name, f"{count} tensors, {human_bytes(size)}")
        for name, (count, size) in result.groups.items()
    ]
    if result.balance is not None:
        rows.append(("largest file", f"{result.balance:.2f} x the smallest"))
    rows += [(f"kept: {key}", _short(value)) for key, value in sorted(result.meta.items())]
    table("", ("", ""), rows)
    table(
        "",
        ("file", "size", "pieces"),
        [(file.name, human_bytes(file.bytes), file.pieces) for file in result.files],
        numeric=" rr",
    )


def stalls(run: _Run, svg: _Svg = None, output: _Output = Format.text) -> None:
    """Show for how long each save of a run held training up, by cause.

    **Examples**

        shoal model stalls runs/run

        shoal model stalls runs/run --svg stalls.svg
    """
    from shoal.app.show import as_json, table
    from shoal.checkpoint.history import stalls as picture

    saves = _saves(run)
    _draw(svg, lambda: picture(saves).render(), output)
    if output is Format.json:
        as_json([_plain(one) for one in saves])
        return
    causes = list(dict.fromkeys(cause for one in saves for cause in one.blocked_s))
    table(
        "seconds for which training was blocked",
        ("step", "mode", *causes, "in all", "until durable", "state", "farther levels"),
        [
            (
                one.step,
                one.mode,
                *(_seconds(one.blocked_s.get(cause)) for cause in causes),
                _seconds(one.stall_s),
                _seconds(one.seconds),
                f"failed: {one.message}" if one.failed else "saved",
                ", ".join(f"{stay.place} {stay.state}" for stay in one.levels),
            )
            for one in saves
        ],
        numeric="r " + "r" * (len(causes) + 2),
    )
    notes = [one.stall_s for one in saves if one.stall_s is not None]
    if notes:
        typer.echo(
            f"{len(saves)} saves, {sum(notes):.4g} s in all, {max(notes):.4g} s the longest stall"
        )


def timeline(
    run: _Run,
    step: Annotated[int | None, typer.Option(help="Save to show. [default: the newest]")] = None,
    svg: _Svg = None,
    heat: Annotated[
        Path | None,
        typer.Option("--heat", help="Write a heat map of ranks and phases to this file."),
    ] = None,
    output: _Output = Format.text,
) -> None:
    """Show what every rank did in a save, phase by phase, and who was slowest.

    **Examples**

        shoal model timeline runs/run

        shoal model timeline runs/run --step 100 --svg save.svg --heat heat.svg
    """
    from shoal.app.show import as_json, table
    from shoal.checkpoint.history import heat_map, pick, slowest
    from shoal.checkpoint.history import timeline as picture
    from shoal.core.sizes import human_bytes

    save = pick(_saves(run), step)
    _draw(svg, lambda: picture(save).render(), output)
    _draw(heat, lambda: heat_map(save).render(), output)
    worst = slowest(save)
    if output is Format.json:
        as_json({**_plain(save), "slowest": worst})
        return
    grid = heat_map(save)
    table(
        f"save of step {save.step}, seconds of each rank; * is the slowest",
        ("rank", *grid.columns, "from", "to", "bytes"),
        [
            (
                rank,
                *(
                    _seconds(value) + ("*" if worst.get(name) == rank else "")
                    for name, value in zip(grid.columns, grid.values[rank], strict=True)
                ),
                *_ends(save, rank),
                "" if share.nbytes is None else human_bytes(share.nbytes),
            )
            for rank, share in enumerate(save.ranks)
        ],
        numeric="r" * (len(grid.columns) + 4),
    )


def _saves(run: Path) -> list[SaveRecord]:
    from shoal.checkpoint.history import history
    from shoal.core.errors import CheckpointError
    from shoal.core.meter import read_events
    from shoal.train.layout import RunDir

    directory = RunDir(run)
    if not directory.events.is_file():
        raise CheckpointError(f"{run}: no events.jsonl; give the directory of a run")
    saves = history(read_events(directory.events))
    if not saves:
        raise CheckpointError(f"{run}: no checkpoint yet; see checkpoint.every of its plan")
    return saves


def _plain(save: SaveRecord) -> dict[str, Any]:
    """As JSON, in which what is not known is null."""
    from dataclasses import asdict
    from math import isfinite

    result = asdict(save) | {"stall_s": save.stall_s}
    return {
        key: None if isinstance(value, float) and not isfinite(value) else value
        for key, value in result.items()
    }


def _draw(path: Path | None, render: Any, output: Format) -> None:
    from shoal.core.files import write_atomic

    if path is not None:
        write_atomic(path, render())
        typer.echo(f"wrote {path}", err=output is Format.json)


def _ends(save: SaveRecord, rank: int) -> tuple[str, str]:
    """When a rank began and ended, after the save began."""
    spans = save.ranks[rank].spans_s.values()
    if not spans:
        return "", ""
    return _seconds(min(span[0] for span in spans)), _seconds(max(span[1] for span in spans))


def _seconds(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.4f}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."
