"""Boards of published runs by their names, as tables for people and as figures for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, require
from shoal.core.tables import Table, table_of
from shoal.cost.published.board import Scoreboard, share_within
from shoal.cost.published.page import results
from shoal.cost.published.rows import read
from shoal.cost.published.scoreboard import score_training
from shoal.cost.published.serving import read_serving
from shoal.cost.published.serving_scoreboard import score_serving
from shoal.cost.published.silicon import read_text
from shoal.cost.published.silicon_board import (
    SiliconBoard,
    score_silicon,
    score_silicon_file,
    silicon_results,
    worst,
)

Board = Scoreboard | SiliconBoard
_BOARDS: dict[str, Callable[[], Board]] = {
    "training": score_training,
    "serving": score_serving,
    "closed-loop": score_silicon,
}


def board_of(kind: str) -> Board:
    """The published runs of one kind, or of a file, predicted beside reported.

    Args:
        kind: training, serving or closed-loop; or a CSV file with the columns of one of these.

    Raises:
        ConfigError: there is no such kind, or the file has none of these columns.
    """
    path = Path(kind)
    if path.suffix in (".csv", ".gz"):
        return _read(path)
    require(
        kind in _BOARDS,
        "--published",
        kind,
        expected=f"{', '.join(_BOARDS)} or a CSV file with the columns of one of these",
    )
    return _BOARDS[kind]()


def board_results(board: Board) -> dict[str, Any]:
    """The figures of a board, for programs."""
    if isinstance(board, SiliconBoard):
        return silicon_results(board)
    result: dict[str, Any] = results(board)[board.kind] if board.rows else {}
    return result


def board_tables(board: Board, last: int) -> Iterator[Table | str]:
    """So many of a board's runs, the worst first, and the medians of all."""
    if isinstance(board, SiliconBoard):
        yield from _silicon_tables(board, last)
    else:
        yield from _run_tables(board, last)


def _read(path: Path) -> Board:
    """The board of a file, by its columns."""
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


def _silicon_tables(board: SiliconBoard, last: int) -> Iterator[Table | str]:
    result = silicon_results(board)
    yield table_of(
        "closed loops, largest errors first",
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
        "   rrr",
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
    yield table_of(
        f"errors ({board.skipped.total()} rows not replayed)",
        ("runs of", "quantity", "rows", "median error", "within 25 %", "in the interval"),
        rows,
        "  rrrr",
    )
    for why, count in board.skipped.most_common(10):
        yield f"not replayed: {count} rows: {why}"


def _run_tables(board: Scoreboard, last: int) -> Iterator[Table | str]:
    kind = board.kind
    if not board.rows:
        for name, why in list(board.skipped.items())[:last]:
            yield f"not replayed: {name}: {why}"
        return
    result = board_results(board)
    shown = sorted(board.rows, key=lambda row: -abs(row.error))[:last]
    yield table_of(
        f"published {kind} runs, largest errors first",
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
            for row in shown
        ],
        "   rrrr ",
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
    yield table_of(
        f"errors, each publication left out ({len(board.skipped)} rows not replayed; "
        f"90 % intervals hold {board.coverage:.0%})",
        ("publication", "rows", "median error", "within 25 %"),
        summary,
        " rrr",
    )
