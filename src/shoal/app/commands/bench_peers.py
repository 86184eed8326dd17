"""``shoal bench serve --peers``: engines beside each other on this machine."""

from __future__ import annotations

from pathlib import Path

from shoal.core.scratch import scratch_directory


def run(
    model: str | None,
    *,
    environments: Path | None,
    rounds: int,
    threads: int,
    anyway: bool,
    out: Path | None,
    quiet: bool,
) -> None:
    """Run the table, print it, and write it if asked to.

    Args:
        model: a model directory or an id of the hub; random weights of 205.6 M parameters without.
        environments: where the peers are installed.
        rounds: timed rounds.
        threads: of every engine; 0 for all cores.
        anyway: measure on a busy machine too.
        out: a file in .json.
        quiet: print the table only.
    """
    import typer

    from shoal.api.loading import model_directory
    from shoal.app.show import WorkBar, table, wait_until_quiet
    from shoal.claims.bench.serving.run import COLUMNS, bench, notes, random_directory, rows
    from shoal.core.errors import require
    from shoal.core.files import write_json
    from shoal.core.measure import num_cores

    if out is not None:
        require(out.suffix == ".json", "--out", str(out), expected="a name in .json")
    given = None if model is None else model_directory(model)
    wait_until_quiet(anyway=anyway, quiet=quiet)
    with scratch_directory("peers") as place:
        directory = given or random_directory(place)
        with WorkBar("bench serve --peers", quiet=quiet) as bar:
            result = bench(
                directory,
                environments=environments,
                rounds=rounds,
                threads=threads or num_cores(),
                progress=lambda what, done, total: bar(done, total, what),
            )
    title = f"{result.model}; {result.threads} threads each"
    table(title, COLUMNS, rows(result))
    typer.echo(", ".join(f"{name} {version}" for name, version in result.versions.items()))
    for note in notes(result):
        typer.echo(note)
    if out is not None:
        write_json(out, result.model_dump(mode="json"))
