"""Quantities that kinds of job share are summed up, and named, for each kind."""

from shoal.core.tables import Table
from shoal.cost.score_rows import ScoreRow, summarise
from shoal.cost.score_tables import score_tables


def row(kind: str, measured: float) -> ScoreRow:
    return ScoreRow(
        recorded_s=0.0,
        name=kind,
        model="",
        machine="a|cpu|2|1",
        quantity="total_s",
        predicted=2.0,
        low=1.0,
        high=4.0,
        measured=measured,
        device="cpu",
        kind=kind,
    )


def errors_of(rows: list[ScoreRow]) -> Table:
    shown = list(score_tables(rows, summarise(rows), last=20, everything=False))
    return next(one for one in shown if isinstance(one, Table) and one.title == "errors")


def test_each_kind_has_a_row_of_its_own() -> None:
    rows = [row("train", 2.0), row("dedupe", 20.0), row("train", 2.2)]
    errors = errors_of(rows)
    assert errors.columns[:3] == ("job", "quantity", "runs")
    assert [one[:3] for one in errors.rows] == [
        ("train", "time of all steps", "2"),
        ("dedupe", "time", "1"),
    ]


def test_one_kind_needs_no_column_of_its_name() -> None:
    errors = errors_of([row("train", 2.0)])
    assert errors.columns[:2] == ("quantity", "runs")
    assert errors.rows[0][0] == "time of all steps"
