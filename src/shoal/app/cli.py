"""The command ``shoal``.

Each verb is a function in ``commands/`` that imports what it needs when it runs, so
``shoal --help`` is quick. A user's error is one line and status 2.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shoal import __version__
from shoal.app.commands import (
    bench,
    check,
    claims,
    dash,
    demo,
    doctor,
    explain,
    jobs,
    model,
    plan,
    probe,
    score,
    serve,
    train,
)
from shoal.core.errors import ShoalError
from shoal.core.files import shoal_home
from shoal.core.stopping import interruption, status_of

__all__ = ["app", "main"]


class _Verbs(TyperGroup):
    """Verbs of one word and of two: ``train`` takes a file, and ``train diagnose`` a run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of the first word, or of the first two."""
        both = " ".join(args[:2])
        if len(args) > 1 and both in self.commands:
            args = [both, *args[2:]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a signal that ends it gives its own exit status."""
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            stop = interruption(error)
            if stop is None or isinstance(error, ShoalError):
                raise
            typer.echo("stopped", err=True)
            raise typer.Exit(status_of(stop)) from None


app = typer.Typer(
    name="shoal",
    cls=_Verbs,
    help="Predict what a large-model job will cost on your machines, run it there, keep score.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the trace of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every verb."""
    if debug:
        os.environ["SHOAL_DEBUG"] = "1"


app.command("probe")(probe.probe)
app.command("doctor")(doctor.doctor)
app.add_typer(plan.app, name="plan")
app.add_typer(jobs.app, name="run")
app.add_typer(explain.app, name="explain")
app.command("train")(train.train)
app.command("train diagnose")(train.diagnose)
app.command("serve")(serve.serve)
app.add_typer(model.app, name="model")
app.add_typer(bench.app, name="bench")
app.command("check")(check.check)
app.command("score")(score.score)
# What was asked here is explained now.
moved = typer.Typer(
    cls=jobs.StudyGroup, hidden=True, help="Now shoal explain.", no_args_is_help=True
)
app.add_typer(moved, name="study")
app.add_typer(claims.app, name="claims")
app.command("dash")(dash.dash)
app.command("demo")(demo.demo)


def main() -> None:
    """Run the command line; errors of the user are one line on stderr and status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a locale cannot show is no error
            stream.reconfigure(errors="backslashreplace")
    # PyTorch's own choice is a name in /tmp that anybody can guess, and take first.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(shoal_home() / "inductor"))
    try:
        app()
    except ShoalError as error:
        if os.environ.get("SHOAL_DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print("stopped", file=sys.stderr)
        sys.exit(status_of(stop))
    except BrokenPipeError:
        # The reader of our output has gone; there is nobody left to tell.
        sys.stderr.close()
        sys.exit(141)
