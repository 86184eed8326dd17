"""``shoal claims``: do the papers' claims hold on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.show import Format, Output

if TYPE_CHECKING:
    from shoal.claims.run import Result

__all__ = ["app"]

app = typer.Typer(help="Check the papers' claims on this machine.", no_args_is_help=True)


@app.command("list")
def list_(
    room: Annotated[str | None, typer.Option(help="Only this room.")] = None,
    status: Annotated[str | None, typer.Option(help="Only this status.")] = None,
    output: Output = Format.text,
) -> None:
    """List all papers of the catalogue with status, evidence, threshold and measurement.

    **Examples**

        shoal claims list --status works

        shoal claims list -o json
    """
    from shoal.app.show import as_json, table
    from shoal.claims.standing import counts, listing

    rows = [
        row
        for row in listing()
        if (room is None or row.room == room) and (status is None or row.status == status)
    ]
    if output is Format.json:
        as_json([row.model_dump(mode="json") for row in rows])
        return
    table(
        "",
        ("id", "name", "year", "room", "status", "evidence", "measured"),
        [(r.id, r.name, r.year, r.room, r.status, r.evidence, _measured(r.measured)) for r in rows],
        numeric="r",
    )
    by_grade = sorted(counts(rows).items(), key=str)
    result = (
        f"{number} {status}" + (f" ({evidence})" if evidence else "")
        for (status, evidence), number in by_grade
    )
    typer.echo(", ".join(result))


@app.command("run")
def run(
    names: Annotated[list[str] | None, typer.Argument(help="Claims by name.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every claim that can run.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Counts only, at most 10 s.")] = False,
    data: Annotated[Path | None, typer.Option(help="Directory of public data.")] = None,
    model: Annotated[str | None, typer.Option(help="A model directory of your own.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.", min=0)] = 0,
    results: Annotated[Path, typer.Option(help="Where results are written.")] = Path("results"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict only.")] = False,
) -> None:
    """Run claims, judge them from their raw samples and record both; exit 1 when one falls short.

    **Examples**

        shoal claims run dissect

        shoal claims run --all --quick
    """
    from shoal.app.show import WorkBar
    from shoal.claims import CLAIMS
    from shoal.claims.run import run as judge
    from shoal.core.errors import ConfigError

    wanted = list(CLAIMS) if all_ else list(names or [])
    if not wanted:
        raise ConfigError(f"no claim named; give --all, or some of {', '.join(CLAIMS)}")
    short = False
    for name in wanted:
        with WorkBar(name, quiet=quiet) as bar:
            result = judge(
                name,
                quick=quick,
                data=data,
                model=model,
                seed=seed,
                results=results,
                progress=lambda text, share, bar=bar: bar(share, 1.0, text),  # type: ignore[misc]
            )
        show_result(name, result)
        short |= result.verdict.status in ("falls_short", "noisy") or bool(result.disagrees)
    if short:
        raise typer.Exit(1)


def _measured(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {number:.3g}" for name, number in numbers.items())


def show_result(name: str, result: Result) -> None:
    """Print a verdict, metric by metric."""
    from shoal.app.show import table

    verdict = result.verdict
    metrics = {metric.name: metric for metric in result.record.metrics}
    table(
        f"{name}: {verdict.status}",
        ("metric", "measured", "90 % interval", "needs", "evidence", "holds"),
        [
            (
                m.name,
                f"{m.value:.4g}",
                f"{m.low:.4g} .. {m.high:.4g}",
                metrics[m.name].condition,
                metrics[m.name].evidence,
                "noisy" if m.noisy else "yes" if m.holds else "NO",
            )
            for m in verdict.metrics
        ],
        numeric=" rr",
    )
    if verdict.reason:
        typer.echo(verdict.reason)
    for metric in result.disagrees:
        typer.echo(f"disagrees with the full run on file: {metric}")
    if result.path is not None:
        typer.echo(f"recorded in {result.path}")


@app.command("check")
def check(
    files: Annotated[list[Path], typer.Argument(help="Files under results/.")],
) -> None:
    """Recompute verdicts from raw samples; exit 2 for a file whose verdict does not follow.

    **Examples**

        shoal claims check results/dissect.json
    """
    from shoal.claims.record import recheck

    for file in files:
        typer.echo(f"{file}: {recheck(file).verdict.status} follows from its samples")


@app.command("report")
def report(
    results: Annotated[Path, typer.Option(help="Where the results files lie.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="Directory to write; an older gallery is replaced.")] = (
        Path("site/gallery")
    ),
) -> None:
    """Write the gallery: a page for each of the papers, as a site that opens from the disk.

    A results file that was edited is shown as such, and the others go on.

    **Examples**

        shoal claims report

        shoal claims report --results results --out gallery
    """
    from shoal.claims.gallery import index_rows, write_gallery
    from shoal.claims.gallery.papers import counts

    page = write_gallery(results, out)
    result = counts(index_rows(results))
    typer.echo(", ".join(f"{number} {name}" for name, number in result.items() if number))
    typer.echo(f"written to {page}")
