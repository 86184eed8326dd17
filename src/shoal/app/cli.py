"""The command ``shoal``.

A verb is imported when it is called, and imports what it needs when it runs: ``shoal --help`` is
quick, and so is a plan. A user's error is one line and status 2.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.models import TyperInfo

from shoal import __version__
from shoal.core.errors import ShoalError
from shoal.core.files import shoal_home
from shoal.core.parts import load_object
from shoal.core.stopping import interruption, status_of

__all__ = ["VERBS", "app", "main"]

VERBS = {
    "probe": "probe:probe",
    "doctor": "doctor:doctor",
    "plan": "plan:app",
    "run": "jobs:app",
    "explain": "explain:app",
    "train": "train:train",
    "train diagnose": "train:diagnose",
    "serve": "serve:serve",
    "model": "model:app",
    "bench": "bench:app",
    "check": "check:check",
    "score": "score:score",
    "study": "jobs:moved",
    "claims": "claims:app",
    "dash": "dash:dash",
    "demo": "demo:demo",
}
"""Verb -> the function or the group of :mod:`shoal.app.commands` that it calls."""


@functools.cache
def _command(verb: str) -> Any:
    """The command of a verb; a process that calls it again has it."""
    value = load_object(f"shoal.app.commands.{VERBS[verb]}")
    if not isinstance(value, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        single.command(verb)(value)
        return typer.main.get_command(single)
    return typer.main.get_group_from_info(
        TyperInfo(value, name=verb),
        pretty_exceptions_short=True,
        suggest_commands=True,
        rich_markup_mode="markdown",
    )


class _Commands(Mapping[str, Any]):
    """Verb -> its command, made when it is asked for."""

    def __getitem__(self, verb: str) -> Any:
        return _command(verb)

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


class _Verbs(TyperGroup):
    """Verbs of one word and of two: ``train`` takes a file, and ``train diagnose`` a run."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.commands: Any = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Every verb, in the order of :data:`VERBS`."""
        return list(VERBS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of the first word, or of the first two."""
        both = " ".join(args[:2])
        if len(args) > 1 and both in VERBS:
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


def main() -> None:
    """Run the command line; errors of the user are one line on stderr and status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a locale cannot show is no error
            stream.reconfigure(errors="backslashreplace")
    # PyTorch's own choice is a name in /tmp that any user can guess, and take first.
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
        # The reader of our output has gone: nothing more can be reported.
        sys.stderr.close()
        sys.exit(141)
