"""The scoreboard of published runs, on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from shoal.app.show import Format, as_json, table
from shoal.cost.published.board import Scoreboard

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.cost.published.silicon_board import SiliconBoard

__all__ = ["PUBLISHED", "show_published"]

PUBLISHED = ("training", "serving", "closed-loop")


def show_published(kind: str, output: Format, last: int) -> None:
    """Print predicted beside reported for the published runs of one kind, or of a file.

    Args:
        kind: training, serving or closed-loop; or a CSV file with the columns of one of these.
        output: text or json.
        last: rows to show, the worst first; the medians are of all rows.

    Raises:
        ConfigError: there is no such kind, or the file has none of these columns.
    """
    from pathlib import Path

    from shoal.core.errors import require
    from shoal.cost.published.scoreboard import score_training
    from shoal.cost.published.serving_scoreboard import score_serving
    from shoal.cost.published.silicon_board import score_silicon

    path = Path(kind)
    if path.suffix in (".csv", ".gz"):
        board = _board_of(path)
    else:
        require(
            kind in PUBLISHED,
            "--published",
            kind,
            expected=f"{', '.join(PUBLISHED)} or a CSV file with the columns of one of these",
        )
        boards = (score_training, score_serving, score_silicon)
        board = boards[PUBLISHED.index(kind)]()
    if isinstance(board, Scoreboard):
        _show_board(board, output, last)
    else:
        _show_silicon(board, output, last)


def _board_of(path: Path) -> Scoreboard | SiliconBoard:
    """The board of a file, by its columns."""
    from shoal.core.errors import ConfigError
    from shoal.cost.published.rows import read
    from shoal.cost.published.scoreboard import score_training
    from shoal.cost.published.serving import read_serving
    from shoal.cost.published.serving_scoreboard import score_serving
    from shoal.cost.published.silicon import read_text
    from shoal.cost.published.silicon_board import score_silicon_file

    columns = read_text(path).partition("\n")[0].split(",")
    if "silicon_tpot_ms" in columns:
        return score_silicon_file(path)
    if "workload" in columns:
        return score_serving(read_serving(path))
    if "reported_metric" in columns:
        return score_training(read(path))
    raise ConfigError(
        f"{path}: columns {', '.join(columns[:6])} ...; expected those of a table of training "
        "runs (reported_metric), of serving runs (workload) or of closed loops (silicon_tpot_ms)"
    )


def _show_silicon(board: SiliconBoard, output: Format, last: int) -> None:
    """Print the runs of closed loops."""
    from shoal.cost.published.silicon_board import silicon_results, worst

    result = silicon_results(board)
    if output is Format.json:
        as_json(result)
        return
    table(
        "closed loops, furthest off first",
        ("model", "device", "run", "tpot", "predicted", "error"),
        [
            (
                score.run.model,
                score.run.device,
                score.run.run,
                f"{1e3 * score.measured('tpot'):.1f} ms",
                f"{1e3 * score.predicted['tpot']:.1f} ms",
                f"{score.error('tpot'):+.0%}",
            )
            for score in worst(board.scores["model"], last)
        ],
        numeric="   rrr",
    )
    rows = []
    for key in board.scores:
        for quantity, whole in result[f"{key}s_left_out"].items():
            for group, some in [(f"each {key}", whole), *whole["by_group"].items()]:
                within, covered = some["share_within_25"], some["coverage_of_90"]
                error = f"{some['median_error']:.1%}"
                rows.append(
                    (group, quantity, some["rows"], error, f"{within:.0%}", f"{covered:.0%}")
                )
    table(
        f"errors ({board.skipped.total()} rows not replayed)",
        ("runs of", "quantity", "rows", "median error", "within 25 %", "in the interval"),
        rows,
        numeric="  rrrr",
    )
    for why, count in board.skipped.most_common(10):
        typer.echo(f"not replayed: {count} rows: {why}")


def _show_board(board: Scoreboard, output: Format, last: int) -> None:
    """Print the runs of training or of serving."""
    from shoal.cost.published.board import share_within
    from shoal.cost.published.page import results

    kind = board.kind
    if not board.rows:
        for name, why in list(board.skipped.items())[:last]:
            typer.echo(f"not replayed: {name}: {why}")
        return
    result = results(board)[kind]
    if output is Format.json:
        as_json(result)
        return
    worst = sorted(board.rows, key=lambda row: -abs(row.error))[:last]
    table(
        f"published {kind} runs, furthest off first",
        ("run", "device", "quantity", "reported", "predicted", "90 % interval", "error", "why"),
        [
            (
                row.id,
                f"{row.devices} x {row.device}",
                row.metric,
                f"{row.reported:.4g}",
                f"{row.predicted:.4g}",
                f"{row.low:.3g} .. {row.high:.3g}",
                f"{row.error:+.0%}",
                row.reason,
            )
            for row in worst
        ],
        numeric="   rrrr ",
    )
    summary = [
        (
            group,
            sum(row.group == group for row in board.rows),
            f"{board.median_error(group):.1%}",
            f"{share_within([r for r in board.rows if r.group == group]):.0%}",
        )
        for group in board.groups()
    ]
    summary.append(
        ("all", len(board.rows), f"{board.median_error():.1%}", f"{share_within(board.rows):.0%}")
    )
    for name, errors in result["baselines"].items():
        summary.append((f"all, {name} style", len(board.rows), f"{errors['median_error']:.1%}", ""))
    table(
        f"errors, each publication left out ({len(board.skipped)} rows not replayed; "
        f"90 % intervals hold {board.coverage:.0%})",
        ("publication", "rows", "median error", "within 25 %"),
        summary,
        numeric=" rrr",
    )
