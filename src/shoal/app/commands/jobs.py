"""``shoal plan KIND`` and ``shoal run KIND``, for every kind of job of the table.

A kind's flags, its quantities and what it does come from its part; nothing here knows one by name.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from shoal.app.show import (
    Format,
    as_json,
    say_if_elsewhere,
    show,
    show_blocks,
    show_notes,
    show_values,
    table,
)

if TYPE_CHECKING:
    from shoal.api.preparing import PreparedRun
    from shoal.ir import Flag, JobKind, Report


class StudyGroup(TyperGroup):
    """A group some of whose words are studies now."""

    def get_command(self, ctx: Any, name: str) -> Any:
        """The command of that name.

        Raises:
            UnknownPartError: it is a study; says which command explains it.
        """
        from shoal.core.errors import UnknownPartError
        from shoal.core.parts import table as parts

        own = super().get_command(ctx, name)
        if ctx.resilient_parsing:  # a shell completes a line
            return own
        if own is None and (word := name.replace("-", "_")) in parts("study"):
            raise UnknownPartError(f"shoal {ctx.info_name} {name}: renamed to shoal explain {word}")
        return own


class Kinds(StudyGroup):
    """A group with a command for each kind of job, made when it is asked for."""

    @staticmethod
    def action(name: str, kind: JobKind) -> Callable[..., None]:
        """What the command of a kind does."""
        return run_command(name, kind)

    def list_commands(self, ctx: Any) -> list[str]:
        """The group's own commands, then those of kinds that have none of them."""
        from shoal.core.parts import table as parts
        from shoal.ir.job_kind import broken_kinds

        own = super().list_commands(ctx)
        for reason in broken_kinds().values():
            typer.echo(f"left out: {reason}", err=True)
        return [*own, *(name for name in parts("job") if name not in {*own, *broken_kinds()})]

    def get_command(self, ctx: Any, name: str) -> Any:
        """The command of that name."""
        from shoal.core.errors import UnknownPartError, suggestion
        from shoal.core.parts import table as parts
        from shoal.ir import kind_named

        own = super().get_command(ctx, name)
        if own is not None:
            return own
        known = [*self.commands, *parts("job")]
        if name not in known:
            if ctx.resilient_parsing:
                return None
            raise UnknownPartError(
                f"shoal {ctx.info_name} {name}: expected one of {', '.join(sorted({*known}))}"
                + suggestion(name, known)
            )
        single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        single.command(name)(self.action(name, kind_named(name)))
        return typer.main.get_command(single)


class PlanKinds(Kinds):
    """The same, of ``shoal plan``."""

    @staticmethod
    def action(name: str, kind: JobKind) -> Callable[..., None]:
        """Plan a job of the kind."""
        return plan_command(name, kind)


app = typer.Typer(
    cls=Kinds,
    help="Run a job of any kind and score its prediction.\n\n**Examples**\n\n"
    "    shoal run serve shoal-4m --requests 20 --rate 5\n\n"
    "    shoal run cluster job.yaml",
    no_args_is_help=True,
)


# What was asked here is explained now.
moved = typer.Typer(
    cls=StudyGroup, hidden=True, help="Renamed to shoal explain.", no_args_is_help=True
)


def option(name: str, annotation: Any, default: Any, text: str, *words: str) -> inspect.Parameter:
    """A keyword whose words on the command line are ``words``, or follow from its name."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[annotation, typer.Option(*words, help=text)],
    )


def kind_flags(kind: JobKind) -> tuple[Flag, ...]:
    """A kind's flags; its name and its subject have flags of their own everywhere."""
    from shoal.ir import Flag

    more = (
        Flag(name=kind.subject, path=kind.subject, help="The same as the argument.", read=str),
        Flag(name="name", path="name", help="Name of the job, and of its directory.", read=str),
    )
    flags = {flag.name: flag for flag in kind.flags}
    for flag in more:
        flags.setdefault(flag.name, flag)
    return tuple(flags.values())


def subject_help(kind: JobKind) -> str:
    """What the first argument of a kind's commands can be: as its job documents it, or YAML."""
    from shoal.core.config import Kind
    from shoal.core.parts import meanings
    from shoal.core.parts import table as parts

    field = kind.job_type.model_fields[kind.subject]
    chosen = next((one.kind for one in field.metadata if isinstance(one, Kind)), None)
    if chosen is None:
        text = meanings(kind.job_type).get(kind.subject, f"the job's {kind.subject}")
    else:
        text = "one of " + ", ".join(parts(chosen))
    text = text[:1].upper() + text[1:]  # not a name, which begins with a quotation mark
    return text.replace("``", "").rstrip(".") + ". Or a job in YAML, a file that ends in .yaml."


def example_command(verb: str, name: str, kind: JobKind) -> str:
    """A command that runs as it is: the kind's example, on lines of the width of a help page."""
    flags = {flag.path: flag.name.replace("_", "-") for flag in kind_flags(kind)}
    words: list[str] = []
    for path, value in kind.example.items():
        word, options = value, {}
        if isinstance(value, Mapping):
            options = {f"{path}.{key}": one for key, one in value.items() if key != "name"}
            word = value["name"]
        if path == kind.subject:
            words.insert(0, str(word))
        else:
            words.append(f"--{flags[path]} {word}" if path in flags else f"--set {path}={word}")
        words += [f"--set {key}={one}" for key, one in options.items()]
    lines = [f"shoal {verb} {name}"]
    for word in words:
        if len(lines[-1]) + len(word) < _EXAMPLE_WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    return " \\\\\\\n        ".join(lines)  # a backslash and a line's end, in Markdown


def _command(
    kind: JobKind, text: str, options: list[inspect.Parameter], do: Callable[..., None]
) -> Callable[..., None]:
    """A function whose signature has the kind's flags, as typer reads it."""
    subject = inspect.Parameter(
        "subject",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[
            str | None,
            typer.Argument(metavar=kind.subject.upper(), help=subject_help(kind)),
        ],
    )
    flags = [option(flag.name, str | None, None, flag.help) for flag in kind_flags(kind)]

    def command(**given: Any) -> None:
        do(**given)

    parameters = [subject, *flags, *options]
    command.__doc__ = text
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


# Characters of a line of an example.
_EXAMPLE_WIDTH = 74

_MACHINE = option(
    "machine", str, "local", "local, 16xH100, 8xA100@IB200, or a file.", "--machine", "-m"
)
_SET = option("set_", list[str] | None, None, "path=value; overrides everything else.", "--set")
_OUTPUT = option("output", Format, Format.text, "text or json.", "--output", "-o")


def plan_command(name: str, kind: JobKind) -> Callable[..., None]:
    """``shoal plan KIND`` of one kind."""
    from shoal.core.parts import table as parts
    from shoal.ir.job_kind import emits_of

    def do(
        *,
        subject: str | None,
        machine: str,
        set_: list[str] | None,
        top: int,
        out: Path | None,
        verbose: bool,
        quiet: bool,
        output: Format,
        **flags: str | None,
    ) -> None:
        from shoal import api
        from shoal.app.emitting import write_emitted
        from shoal.core.errors import require

        engine, directory = flags.pop("emit", None), flags.pop("emit_dir", None)
        require(top >= 1, "--top", top, expected="1 or more")
        values = _read(kind, flags)
        source: Any = {} if subject is None else subject
        plans = api.plan(
            source, machine, kind=name, sets=set_ or [], environment=os.environ, **values
        )
        if out is not None:
            plans.save(out)
            typer.echo(f"saved {out}", err=True)
        if engine is not None:
            where = None if directory is None else Path(directory)
            write_emitted(list(plans), engine, where, emits)
        if output is Format.json:
            as_json([plan.model_dump(mode="json", exclude_none=True) for plan in plans[:top]])
        else:
            show_blocks(plans.tables(top=top, verbose=verbose, brief=quiet))
        if not plans.best.fits:
            raise typer.Exit(1)

    emits = emits_of(kind)
    emitting = (
        [
            option("emit", str | None, None, "Write an app for: " + ", ".join(parts(emits)) + "."),
            option("emit_dir", str | None, None, "Directory for --emit. [default: launch-NAME]"),
        ]
        if emits
        else []
    )
    options = [
        _MACHINE,
        _SET,
        *emitting,
        option("top", int, 5, "Number of plans to show."),
        option("out", Path | None, None, "Save the best plan to this file."),
        option("verbose", bool, False, "Also show time and memory by cause.", "--verbose", "-v"),
        option("quiet", bool, False, "Print the first table only.", "--quiet", "-q"),
        _OUTPUT,
    ]
    text = f"""Predict the cost to {kind.summary}; nothing runs.

    **Examples**

        {example_command("plan", name, kind)}

        shoal plan {name} job.yaml --machine laptop --out plan.yaml
    """
    return _command(kind, text, options, do)


def run_command(name: str, kind: JobKind) -> Callable[..., None]:
    """``shoal run KIND`` of one kind."""

    def do(
        *,
        subject: str | None,
        plan: Path | None,
        directory: Path | None,
        machine: str,
        set_: list[str] | None,
        resume: bool,
        dry_run: bool,
        anyway: bool,
        quiet: bool,
        output: Format,
        **flags: str | None,
    ) -> None:
        from shoal.api.preparing import prepare
        from shoal.api.running import run_prepared
        from shoal.app.show import TrainingBar, say_if_slower

        ready = prepare(
            subject,
            kind=name,
            plan=plan,
            machine=machine,
            directory=directory,
            resume=resume,
            fetch=not dry_run,
            here=not dry_run,
            anyway=anyway,
            sets=set_ or [],
            environment=os.environ,
            **_read(kind, flags),
        )
        show_notes(ready.notes)
        if dry_run:
            show_prepared(ready, output)
            return
        say_if_slower()
        with (
            continuable(f"run {name}", ready.directory),
            TrainingBar(quiet=quiet, before=name) as bar,
        ):
            report = run_prepared(ready, resume=resume, watch=bar, anyway=anyway)
        show_report(report, ready.directory, output)

    options = [
        option("plan", Path | None, None, "Run this plan, written by shoal plan --out."),
        option(
            "directory", Path | None, None, "Directory of the run. [default: runs/NAME]", "--dir"
        ),
        _MACHINE,
        _SET,
        option("resume", bool, False, "Resume the run in that directory.", "--resume"),
        option("dry_run", bool, False, "Show job and plan; run nothing.", "--dry-run"),
        option("anyway", bool, False, "Run a plan for another device here.", "--anyway"),
        option("quiet", bool, False, "Print the result only.", "--quiet", "-q"),
        _OUTPUT,
    ]
    text = f"""Plan and {kind.summary}; report prediction and measurement.

    **Examples**

        {example_command("run", name, kind)}

        shoal run {name} job.yaml --dry-run

        shoal run {name} --dir runs/{kind.job_type.model_fields["name"].default} --resume
    """
    return _command(kind, text, options, do)


def _read(kind: JobKind, given: Mapping[str, str | None]) -> dict[str, Any]:
    """Dotted path -> value, of flags that were given."""
    from shoal.core.files import parse_yaml

    values: dict[str, Any] = {}
    for flag in kind_flags(kind):
        text = given[flag.name]
        if text is not None:
            word = f"--{flag.name.replace('_', '-')}"
            values[flag.path] = parse_yaml(text, word) if flag.read is None else flag.read(text)
    return values


@contextlib.contextmanager
def continuable(command: str, directory: Path, more: str = "") -> Iterator[None]:
    """Say how a run goes on that a signal has stopped; ``more`` are other words of its command."""
    try:
        yield
    except KeyboardInterrupt:
        if (directory / "plan.yaml").exists():
            typer.echo(f"continue with: shoal {command} --dir {directory} --resume{more}", err=True)
        raise


def show_prepared(ready: PreparedRun, output: Format) -> None:
    """Print a run that was prepared: its configuration, and its plan."""
    from shoal.ir.job_kind import plan_tables

    if output is Format.json:
        as_json(ready.plan.model_dump(mode="json", exclude_none=True))
        return
    if ready.resolved is not None:
        show_values(ready.resolved, output)
    show_blocks(plan_tables(ready.kind, [ready.plan]))


def show_report(report: Report[Any], directory: Path, output: Format = Format.text) -> None:
    """Print prediction and measurement, and what the run left behind."""
    from shoal.ir import compared, kind_of

    if output is Format.json:
        as_json(report.model_dump(mode="json", exclude_none=True))
        return
    table(
        "prediction and measurement",
        ("", "predicted", "measured", "error"),
        compared(report),
        numeric=" rrr",
    )
    say_if_elsewhere(report)
    for one in kind_of(report.plan).results(report, directory):
        if isinstance(one, str):
            typer.echo(one)
        else:
            show(one)
