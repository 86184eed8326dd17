"""The command ``shoal``.

A verb is imported when it is called, and imports what it needs when it runs: ``shoal --help`` is
quick, and so is a plan. A user's error is one line and status 2.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.models import TyperInfo

from shoal.core.errors import ShoalError
from shoal.core.extras import missing_extra
from shoal.core.files import shoal_home
from shoal.core.parts import load_object
from shoal.core.stopping import interruption, status_of
from shoal.core.theme import echo
from shoal.core.version import __version__

VERBS = {
    "probe": "probe:probe",
    "plan": "plan:app",
    "explain": "explain:app",
    "score": "score:score",
    "run": "jobs:app",
    "train": "train:train",
    "serve": "serve:serve",
    "bench": "bench:app",
    "demo": "demo:demo",
    "doctor": "doctor:doctor",
    "check": "check:check",
    "train diagnose": "train:diagnose",
    "model": "model:app",
    "claims": "claims:app",
    "dash": "dash:dash",
    "study": "jobs:moved",
}
"""Verb -> the function or the group of :mod:`shoal.app.commands` that it calls."""

PANELS = {
    "Plan and predict": {
        "probe": "Measure this machine, or show a described one.",
        "plan": "Predict the cost of a job and rank its plans.",
        "explain": "Explain a technique: options, cost, picture, verdict.",
        "score": "Compare past predictions with measurements.",
    },
    "Run": {
        "run": "Run a job of any kind, from its plan to its report.",
        "train": "Train or fine-tune a model on one or many ranks.",
        "serve": "Serve a model with an OpenAI-compatible API.",
        "bench": "Benchmark serving and kernels beside predictions.",
        "demo": "Run all steps: probe, plan, train, serve, claims.",
    },
    "Check and look": {
        "doctor": "Check the installation and suggest fixes.",
        "check": "Compare a parallel step with one process.",
        "train diagnose": "Find slow and hanging ranks of a run.",
        "model": "Inspect, convert and try models and checkpoints.",
        "claims": "Test the claims of papers on this machine.",
        "dash": "Show machine, runs, plans and score in a browser.",
    },
}
"""Panel of ``shoal --help`` -> its verbs, each in one line."""


@functools.cache
def _command(verb: str) -> Any:
    """The command of a verb; a process that calls it again has it."""
    command = _loaded(verb)
    for panel, verbs in PANELS.items():
        if verb in verbs:
            command.rich_help_panel, command.short_help = panel, verbs[verb]
    if "_SHOAL_COMPLETE" in os.environ:
        from shoal.app.completion import complete

        complete(command, tuple(verb.split()))
    return command


def _loaded(verb: str) -> Any:
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


# Two words -> the verb and the flag that they mean.
_SPELLED = {"score repair": ("score", "--repair")}


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
        args = [*_SPELLED.get(both, args[:2]), *args[2:]]
        if len(args) > 1 and both in VERBS:
            args = [both, *args[2:]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a signal that ends it gives its own exit status.

        Raises:
            MissingExtraError: the command needs an optional package that is not installed.
        """
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            absent = missing_extra(error, f"shoal {ctx.invoked_subcommand}")
            if absent is not None:
                raise absent from error
            stop = interruption(error)
            if stop is None or isinstance(error, ShoalError):
                raise
            typer.echo("stopped", err=True)
            raise typer.Exit(status_of(stop)) from None


app = typer.Typer(
    name="shoal",
    cls=_Verbs,
    help="Predict the cost of training or serving a large model, run it, and compare.",
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
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every verb."""
    if debug:
        os.environ["SHOAL_DEBUG"] = "1"


def main(begin: Callable[[], None] | None = None) -> None:
    """Run the command line; errors of the user are one line on stderr and status 2.

    Args:
        begin: called where a signal ends the command without a trace.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a locale cannot show is no error
            stream.reconfigure(errors="backslashreplace")
    # PyTorch's own choice is a name in /tmp that any user can guess, and take first.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(shoal_home() / "inductor"))
    try:
        if begin is not None:
            begin()
        app(prog_name="shoal")
    except ShoalError as error:
        if os.environ.get("SHOAL_DEBUG"):
            raise
        echo(f"error: {error}", stderr=True)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print("stopped", file=sys.stderr)
        sys.exit(status_of(stop))
    except BrokenPipeError:
        # The reader of our output has gone: nothing more can be reported.
        sys.stderr.close()
        sys.exit(141)
