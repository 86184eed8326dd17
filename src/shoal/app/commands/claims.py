"""``shoal claims``: do the papers' claims hold on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.app.show import Format, Output

if TYPE_CHECKING:
    from shoal.claims.run import Result
    from shoal.claims.standing import CatalogueEntry

app = typer.Typer(
    help="Test the claims of papers on this machine.\n\n**Examples**\n\n"
    "    shoal claims list --status works\n\n"
    "    shoal claims run dissect",
    no_args_is_help=True,
)


@app.command("list")
def list_(
    room: Annotated[str | None, typer.Option(help="Only claims of this room.")] = None,
    status: Annotated[str | None, typer.Option(help="Only claims with this status.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Also list claims without a result.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show evidence and every metric.")
    ] = False,
    output: Output = Format.text,
) -> None:
    """List the papers of the catalogue with status and headline number.

    **Examples**

        shoal claims list

        shoal claims list --status works -v

        shoal claims list --status planned

        shoal claims list -o json
    """
    from typing import get_args

    from shoal.app.show import as_json, show
    from shoal.claims.catalogue import catalogue
    from shoal.claims.protocols import Status
    from shoal.claims.standing import listing
    from shoal.core.errors import require
    from shoal.core.tables import cut, table_of

    known = get_args(Status)
    require(status in (None, *known), "--status", status, expected=f"one of {', '.join(known)}")
    rooms = sorted({row.room for row in catalogue()})
    require(room in (None, *rooms), "--room", room, expected=f"one of {', '.join(rooms)}")
    # Whether code has changed since takes longer than all the rest.
    rows = [
        row
        for row in listing(stale=verbose or output is Format.json)
        if room in (None, row.room) and status in (None, row.status)
    ]
    if output is Format.json:
        as_json([row.model_dump(mode="json") for row in rows])
        return
    shown = [row for row in rows if all_ or status is not None or row.status != "planned"]
    if verbose:
        _list_all(shown)
    else:
        cells = [
            (cut(r.name, 22), r.room, r.status, cut(r.headline, 20), _measured(r, r.headline))
            for r in shown
        ]
        columns = ("name", "room", "status", "metric", "measured")
        show(table_of("", columns, cells, "    r"), most=80)
    counted = [(name, sum(row.status == name for row in rows)) for name in known]
    typer.echo(", ".join(f"{number} {name}" for name, number in counted if number))
    if len(shown) < len(rows):
        typer.echo(f"{len(rows) - len(shown)} have no result; --all lists them, too")


def _list_all(rows: list[CatalogueEntry]) -> None:
    """Print rows with all their metrics."""
    for row in rows:
        grade = f" ({row.evidence})" if row.evidence else ""
        stale = ", stale" * row.stale
        typer.echo(f"{row.id} {row.name} ({row.year}), {row.room}: {row.status}{grade}{stale}")
        for name, condition in row.threshold.items():
            typer.echo(f"    {name} {_measured(row, name) or 'not measured'}; needs {condition}")
        if row.reason:
            typer.echo(f"    {row.reason}")


@app.command("run")
def run(
    names: Annotated[list[str] | None, typer.Argument(help="Names of claims.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Run every claim that can run.")] = False,
    stale: Annotated[
        bool, typer.Option("--stale", help="Run claims whose code has changed since, oldest first.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only counts; at most 10 s per claim.")
    ] = False,
    data: Annotated[Path | None, typer.Option(help="Directory of public data.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A model directory of your own, or ORG/NAME of the hub.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.", min=0)] = 0,
    results: Annotated[Path, typer.Option(help="Directory for results.")] = Path("results"),
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="option=value of the claim that is named.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict only.")] = False,
    output: Output = Format.text,
) -> None:
    """Run claims, judge them from their raw samples and record both; exit 1 when one falls short.

    **Examples**

        shoal claims run dissect

        shoal claims run --all --quick

        shoal claims run --stale

        shoal claims run fedcompass --set appfl=envs/appfl/bin/python
    """
    from shoal.api.loading import model_directory
    from shoal.app.show import WorkBar, as_json
    from shoal.claims import CLAIMS
    from shoal.claims.run import run as judge
    from shoal.claims.standing import to_run_again
    from shoal.core.errors import ConfigError

    wanted = list(CLAIMS) if all_ else to_run_again(results) if stale else list(names or [])
    if not wanted and stale:
        typer.echo("no result is stale")
        return
    if not wanted:
        raise ConfigError(f"no claim is named; give --all, or some of {', '.join(CLAIMS)}")
    if set_ and len(wanted) != 1:
        raise ConfigError(f"--set is for one claim, and {len(wanted)} are named")
    options = _options(set_ or [])
    short = False
    verdicts: list[dict[str, Any]] = []
    for number, name in enumerate(wanted):
        left = "" if quick else _time_left(wanted[number:], results)
        with WorkBar(f"{name} ({number + 1} of {len(wanted)}{left})", quiet=quiet) as bar:
            result = judge(
                name,
                quick=quick,
                data=data,
                model=None if model is None else str(model_directory(model)),
                seed=seed,
                results=results,
                options=options,
                progress=lambda text, share, bar=bar: bar(share, 1.0, text),  # type: ignore[misc]
            )
        if output is Format.json:
            verdicts.append({"claim": name, **result.verdict.model_dump(mode="json")})
        else:
            show_result(name, result)
        short |= result.verdict.status in ("falls_short", "noisy") or bool(result.disagrees)
    if output is Format.json:
        as_json(verdicts)
    if short:
        raise typer.Exit(1)


def _options(sets: list[str]) -> dict[str, Any]:
    """What ``option=value`` texts say."""
    from shoal.core.errors import require
    from shoal.core.files import parse_yaml

    options = {}
    for text in sets:
        name, equals, value = text.partition("=")
        require(bool(equals), f"--set {name}", text, expected=f"{name}=VALUE")
        options[name.strip()] = parse_yaml(value, f"--set {name}")
    return options


def _time_left(claims: list[str], results: Path) -> str:
    """When the claims are done if they take as long as the last time; empty if they never ran."""
    from shoal.claims.record import read
    from shoal.core.web.site import seconds

    files = [results / f"{claim}.json" for claim in claims]
    if not all(file.exists() for file in files):
        return ""
    return f", about {seconds(sum(read(file).seconds for file in files))} for the rest"


def _measured(row: CatalogueEntry, metric: str) -> str:
    """What was measured of a metric; empty without a result."""
    from shoal.core.tables import digits

    return digits(row.measured[metric]) if metric in row.measured else ""


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
        typer.echo(f"differs from the stored full run: {metric}")
    if result.path is not None:
        typer.echo(f"recorded in {result.path}")


@app.command("check")
def check(
    files: Annotated[list[Path], typer.Argument(help="Files under results/.")],
    output: Output = Format.text,
) -> None:
    """Recompute verdicts from raw samples; exit 2 for a file whose verdict does not follow.

    **Examples**

        shoal claims check results/dissect.json
    """
    from shoal.app.show import as_json
    from shoal.claims.record import recheck

    results = {str(file): recheck(file).verdict.status for file in files}
    if output is Format.json:
        as_json(results)
        return
    for file, status in results.items():
        typer.echo(f"{file}: {status} is confirmed by its samples")


@app.command("judge")
def judge_(
    files: Annotated[list[Path], typer.Argument(help="Files under results/.")],
    output: Output = Format.text,
) -> None:
    """Judge samples on file again, by the thresholds and rules of today, and write the verdicts.

    **Examples**

        shoal claims judge results/dissect.json
    """
    from shoal.app.show import as_json
    from shoal.claims.record import judge_again, read

    results = []
    for file in files:
        before = read(file).verdict.status
        record = judge_again(file)
        verdict = record.verdict
        results.append({"claim": record.claim, "was": before, **verdict.model_dump(mode="json")})
        if output is Format.text:
            changed = f" (was {before})" * (verdict.status != before)
            typer.echo(f"{record.claim}: {verdict.status}{changed} {verdict.reason}".strip())
    if output is Format.json:
        as_json(results)


@app.command("report")
def report(
    results: Annotated[
        Path | None, typer.Option(help="Directory of result files. [default: those of the clone]")
    ] = None,
    out: Annotated[Path, typer.Option(help="Output directory; an older gallery is replaced.")] = (
        Path("site/gallery")
    ),
    output: Output = Format.text,
) -> None:
    """Write the gallery: a page for each of the papers, as a site that opens from the disk.

    A results file that was edited is shown as such, and the others go on.

    **Examples**

        shoal claims report

        shoal claims report --results results --out gallery
    """
    from shoal.app.show import as_json
    from shoal.claims.gallery import index_rows, write_gallery
    from shoal.claims.gallery.papers import counts
    from shoal.claims.shipped import results_directory

    place = results or results_directory()
    page = write_gallery(place, out)
    result = counts(index_rows(place))
    if output is Format.json:
        as_json({**result, "page": str(page)})
        return
    typer.echo(", ".join(f"{number} {name}" for name, number in result.items() if number))
    typer.echo(f"written to {page}")
