"""The scoreboard of published runs, on the terminal."""

from __future__ import annotations

from shoal.app.show import Format, as_json, table

__all__ = ["PUBLISHED", "show_published"]

PUBLISHED = ("training", "serving")


def show_published(kind: str, output: Format, last: int) -> None:
    """Print predicted beside reported for the published runs of one kind.

    Args:
        kind: training or serving.
        output: text or json.
        last: rows to show, the worst first; the medians are of all rows.

    Raises:
        ConfigError: there is no such kind.
    """
    from shoal.core.errors import require
    from shoal.cost.published.board import share_within
    from shoal.cost.published.page import results
    from shoal.cost.published.scoreboard import score_training
    from shoal.cost.published.serving_scoreboard import score_serving

    require(kind in PUBLISHED, "--published", kind, expected=" or ".join(PUBLISHED))
    board = score_training() if kind == "training" else score_serving()
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
