"""The scoreboard as a page of documentation and as a table of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.core.files import write_atomic, write_json
from shoal.cost.gpu.device import GpuCalibration
from shoal.cost.published.baselines import BASELINES
from shoal.cost.published.board import CLOSE, Scoreboard, ScoredRow, figures, scatter, share_within
from shoal.cost.published.calibration import NAMED, PRIOR, fitted
from shoal.cost.published.scoreboard import alternatives
from shoal.cost.published.shared import OneRunStudy, one_run_study
from shoal.cost.published.silicon_board import (
    score_silicon,
    silicon_page,
    silicon_results,
    silicon_worst,
)

WRONG = "how-wrong-are-we.md"
"""The page of misses, beside that of the scoreboard."""

_OPENING = """# Scoreboard

Runs that others published, replayed: what Shoal's cost model says beside what they reported.
The rows are facts from tables, logs and scripts of public repositories; they travel with the
package (`shoal/cost/published/*.csv`), and `shoal score --published` prints this board.

A training row is priced by the very function that prices a plan (`Pricer.estimate` in
`shoal/cost/training/step.py`), asked for the engine of the row in the place of Shoal's own
runtime. A serving row is priced by the function that prices a plan's steps, for the engine that
ran: `AcceleratedStepCost` on accelerators, `Roofline` on CPUs (`shoal/cost/step_cost`).

**Protocol.** {five} named rows set the {constants} constants of training. Before the rows of a
publication are scored, its named row is taken out and the constants are set anew; all tables of
one project count as one publication. No constant belongs to a publication. No row of serving sets
a constant: those of vLLM and TensorRT-LLM are set by the measured closed loops at the end of this
page; what other engines add is counted in their code, taken from their documentation, or assumed
(`shoal/cost/kernels/serving_engines.py`, `shoal/cost/published/serving.py`). Settings of an engine
(which attention kernel, what overlaps) are taken from its documentation and code. What a row
leaves open is completed by a rule, and the row says which; what cannot be replayed is listed with
the reason. The model's structure was written with all rows in sight; only constants that
measurements set are held out.
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


def _constants(prior: GpuCalibration, now: GpuCalibration) -> str:
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
    ]
    for board in boards:
        out += _summary(board)
        if picture:
            out += [f"![{board.kind}]({picture.format(kind=board.kind)})", ""]
        named = (
            "A star marks a row that sets constants." if any(r.named for r in board.rows) else ""
        )
        out += [f"### Rows of {board.kind}", "", *([named, ""] if named else [])]
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
    for board in boards:
        out += ["", *_one_run(one_run_study(board))] if board.kind == "training" else []
    return "\n".join(out).rstrip() + "\n"


def _one_run(study: OneRunStudy) -> list[str]:
    """What one run of one's own is worth."""
    return [
        "## One run of your own",
        "",
        "What `shoal score --calibrate` is worth, on published training runs: "
        f"{study.rows} rows on {study.machines} machines (publication, device, number of devices) "
        "with two rows or more. Each row is predicted with a correction by one other row of its "
        "machine, with each of them in turn; the shares that set the correction come from other "
        "publications.",
        "",
        *_table(
            ("median error of a machine's rows", "median of machines", "mean of machines"),
            [
                (what, f"{middle:.1%}", f"{mean:.1%}")
                for what, (middle, mean) in (
                    ("as priced", study.priced),
                    ("after one other row", study.one),
                    ("after all other rows", study.others),
                )
            ],
        ),
        f"One row lowers the median error of {study.better} of the {study.machines} machines. "
        f"Where it is of the same model, the error falls from {study.same[1]:.1%} to "
        f"{study.same[0]:.1%}, in the median. Rows of other models say little, so the "
        "correction is careful.",
        "",
    ]


_WRONG = """# How wrong are we

The largest errors of predictions for published runs: each row is predicted by the function that
prices a plan, with constants that were fitted without its publication (or model). The
[scoreboard](scoreboard.md) has every row; this page has those that are furthest off, with possible
causes. [Other predictors](predictors.md) compares the errors with those of other programs, and the
[results](results.md) have those of runs on one machine.
"""


def misses(*boards: Scoreboard) -> str:
    """The page of the rows that are further off than a quarter."""
    out = [_WRONG]
    rows = [
        (
            board.kind,
            str(len(board.rows)),
            f"{board.median_error():.1%}",
            f"{figures(row.error for row in board.rows)['p90_error']:.0%}",
            f"{share_within(board.rows):.0%}",
            f"{board.coverage:.0%}",
        )
        for board in boards
    ]
    loops = silicon_results(score_silicon())["models_left_out"]
    for quantity, what in (("tpot", "time per output token"), ("ttft", "time to first token")):
        own = loops[quantity]
        rows.append(
            (
                f"closed loops, {what}",
                str(own["rows"]),
                f"{own['median_error']:.1%}",
                f"{own['p90_error']:.0%}",
                f"{own['share_within_25']:.0%}",
                f"{own['coverage_of_90']:.0%}",
            )
        )
    out += _table(
        ("rows", "number", "median error", "nine in ten within", "within 25 %", "in the interval"),
        rows,
    )
    for board in boards:
        far = sorted(
            (row for row in board.rows if abs(row.error) > CLOSE), key=lambda r: -abs(r.error)
        )
        causes: dict[str, list[float]] = {}
        for row in far:
            causes.setdefault(row.reason, []).append(row.error)
        out += [f"## {board.kind.capitalize()}", ""]
        out += _table(
            ("what may explain it", "rows", "errors"),
            [
                (why, str(len(own)), f"{min(own):+.0%} to {max(own):+.0%}")
                for why, own in sorted(causes.items(), key=lambda one: -len(one[1]))
            ],
        )
        out += _table(
            ("row", "error", "what may explain it"),
            [(r.id, f"{r.error:+.0%}", r.reason) for r in far],
        )
    out += silicon_worst(score_silicon())
    return "\n".join(out).rstrip() + "\n"


def write(page: Path, pictures: Path, table: Path, *boards: Scoreboard) -> None:
    """Write the page, that of its misses beside it, its pictures and the table of results.

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
    write_atomic(page.with_name(WRONG), misses(*boards).encode())
    write_json(table, {**results(*boards), "closed_loop": silicon_results(score_silicon())})
