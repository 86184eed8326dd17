"""The scoreboard as a page of documentation and as a table of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.core.files import write_atomic, write_json
from shoal.cost.gpu.device import GpuCalibration
from shoal.cost.gpu.serve import ServeCalibration
from shoal.cost.published.baselines import BASELINES
from shoal.cost.published.board import CLOSE, Scoreboard, ScoredRow, scatter, share_within
from shoal.cost.published.calibration import NAMED, PRIOR, fitted
from shoal.cost.published.scoreboard import alternatives
from shoal.cost.published.serving_calibration import (
    SERVE_NAMED,
    SERVE_PRIOR,
    serving_calibration_for,
)
from shoal.cost.published.silicon_board import score_silicon, silicon_page, silicon_results

__all__ = ["markdown", "results", "write"]

_OPENING = """# Scoreboard

Runs that others published, replayed: what Shoal's cost model says beside what they reported.
The rows are facts from tables, logs and scripts of public repositories; they travel with the
package (`shoal/cost/published/*.csv`), and `shoal score --published` prints this board.

A training row is priced by the very function that prices a plan (`Pricer.estimate` in
`shoal/cost/training/step.py`), asked for the engine of the row in the place of Shoal's own
runtime. Measured closed loops of serving are priced by the function that prices a plan for
accelerators. The older rows of serving, many of them of laptops and CPUs, are still priced by
`shoal/cost/gpu/serve.py`, which plans do not use.

**Protocol.** {five} named rows set the {constants} constants of the training model, five more
those of the serving model. Before the rows of a publication are scored, its named row is taken
out and the constants are set anew; all tables of one project count as one publication. No
constant belongs to a publication. Settings of an engine (which attention kernel, what overlaps)
are taken from its documentation and code. What a row leaves open is completed by a rule, and
the row says which; what cannot be replayed is listed with the reason. The model's structure was
written with all rows in sight; only its constants are held out.
"""


def results(*boards: Scoreboard) -> dict[str, Any]:
    """What ``results/published.json`` holds."""
    return {
        board.kind: {
            "rows": [
                {
                    **row.model_dump(mode="json", exclude_defaults=True),
                    "error": round(row.error, 4),
                }
                for row in board.rows
            ],
            "skipped": dict(board.skipped),
            "median_error": board.median_error(),
            "share_within_25": share_within(board.rows),
            "share_replayed": len(board.rows) / board.total,
            "coverage_of_90": board.coverage,
            "by_source": {group: board.median_error(group) for group in board.groups()},
            "baselines": {
                name: {
                    "median_error": board.baseline_error(name),
                    "median_error_scaled": board.scaled_error(name),
                }
                for name in BASELINES
                if any(name in row.baselines for row in board.rows)
            },
        }
        for board in boards
    }


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    line = "|" + "|".join("---" for _ in head) + "|"
    body = ["| " + " | ".join(cells) + " |" for cells in rows]
    return ["| " + " | ".join(head) + " |", line, *body, ""]


def _constants(
    prior: GpuCalibration | ServeCalibration, now: GpuCalibration | ServeCalibration
) -> str:
    return ", ".join(
        f"`{name}` {getattr(now, name):.4g} (from {value:.4g})"
        for name, value in vars(prior).items()
    )


def _summary(board: Scoreboard) -> list[str]:
    close = share_within(board.rows)
    whole = close * len(board.rows) / board.total
    out = [
        f"## {board.kind.capitalize()}",
        "",
        f"{len(board.rows)} of {board.total} rows replayed. Median absolute error "
        f"**{board.median_error():.1%}**, each publication left out; {close:.0%} of the replayed "
        f"rows lie within {CLOSE:.0%} ({whole:.0%} of all rows, counting those not replayed as "
        f"misses). The 90 % intervals hold {board.coverage:.0%} of the rows.",
        "",
    ]
    names = [n for n in BASELINES if any(n in row.baselines for row in board.rows)]
    if names:
        for what, (error, close) in alternatives().items():
            out.append(f"Set up otherwise ({what}): {error:.1%}, {close:.0%} within {CLOSE:.0%}.")
        out.append("")
        out += _table(
            ("model", "median error", "after one factor on the named rows"),
            [
                ("Shoal", f"{board.median_error():.1%}", ""),
                *(
                    (
                        f"in the style of {n}",
                        f"{board.baseline_error(n):.1%}",
                        f"{board.scaled_error(n):.1%}",
                    )
                    for n in names
                ),
            ],
        )
    rows = []
    for group in board.groups():
        own = [row for row in board.rows if row.group == group]
        rows.append(
            (
                group,
                str(len(own)),
                f"{board.median_error(group):.1%}",
                f"{share_within(own):.0%}",
                f"{sum(row.covered for row in own) / len(own):.0%}",
            )
        )
    out += _table(("publication", "rows", "median error", "within 25 %", "in the interval"), rows)
    return out


def _row(row: ScoredRow) -> tuple[str, ...]:
    mark = " *" if row.named else ""
    return (
        row.id + mark,
        f"{row.devices} x {row.device}",
        row.run,
        row.metric,
        f"{row.reported:.4g}",
        f"{row.predicted:.4g} ({row.low:.3g} to {row.high:.3g})",
        f"{row.error:+.0%}",
    )


def markdown(*boards: Scoreboard, picture: str = "") -> str:
    """The page.

    Args:
        boards: training, serving.
        picture: path of the picture, relative to the page; ``{kind}`` is replaced.
    """
    out = [_OPENING.format(five=len(NAMED), constants=len(vars(PRIOR)))]
    out += [
        f"Training constants with all named rows: {_constants(PRIOR, fitted())}.",
        "",
        "Set by: " + ", ".join(f"`{name}`" for name in NAMED) + ".",
        "",
        "Serving constants with all named rows: "
        + _constants(SERVE_PRIOR, serving_calibration_for(""))
        + ".",
        "",
        "Set by: " + ", ".join(f"`{name}`" for name in SERVE_NAMED) + ".",
        "",
    ]
    for board in boards:
        out += _summary(board)
        if picture:
            out += [f"![{board.kind}]({picture.format(kind=board.kind)})", ""]
        misses = sorted(
            (row for row in board.rows if abs(row.error) > CLOSE), key=lambda r: -abs(r.error)
        )
        out += [f"### Misses of {board.kind}", ""]
        out += _table(
            ("row", "error", "what may explain it"),
            [(r.id, f"{r.error:+.0%}", r.reason) for r in misses],
        )
        out += [f"### Rows of {board.kind}", "", "A star marks a row that sets constants.", ""]
        out += _table(
            ("row", "on", "run", "quantity", "reported", "predicted (90 %)", "error"),
            [_row(row) for row in board.rows],
        )
        filled = [(r.id, "; ".join(r.filled)) for r in board.rows if r.filled]
        if filled:
            out += [f"### Completed by rules ({board.kind})", ""]
            out += _table(("row", "rules"), filled)
        out += [f"### Not replayed ({board.kind})", ""]
        out += _table(("row", "why"), [(name, why) for name, why in board.skipped.items()])
    out += silicon_page(score_silicon())
    return "\n".join(out).rstrip() + "\n"


def write(page: Path, pictures: Path, table: Path, *boards: Scoreboard) -> None:
    """Write the page, its pictures and the table of results.

    Args:
        page: such as docs/scoreboard.md.
        pictures: a directory below the page's, such as docs/assets.
        table: such as results/published.json.
        boards: training, serving.
    """
    place = pictures.relative_to(page.parent)
    for board in boards:
        name = f"published-{board.kind}.svg"
        write_atomic(pictures / name, scatter(board).render().encode())
    picture = f"{place.as_posix()}/published-{{kind}}.svg"
    write_atomic(page, markdown(*boards, picture=picture).encode())
    write_json(table, {**results(*boards), "closed_loop": silicon_results(score_silicon())})
