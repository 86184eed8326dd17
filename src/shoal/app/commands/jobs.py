"""``shoal plan KIND`` and ``shoal run KIND``, for every kind of job of the table.

A kind's flags, its quantities and what it does come from its part; nothing here knows one by name.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from shoal.app.show import Format, as_json, say_if_elsewhere, show, table

if TYPE_CHECKING:
    from shoal.core.config import ResolvedValue
    from shoal.ir import Job, JobKind, Plan, Report

__all__ = [
    "Kinds",
    "PlanKinds",
    "StudyGroup",
    "app",
    "continuable",
    "moved",
    "option",
    "same_kind",
    "show_job_plans",
    "show_report",
]


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
            raise UnknownPartError(f"shoal {ctx.info_name} {name}: now shoal explain {word}")
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
        from shoal.core.errors import UnknownPartError, nearest
        from shoal.core.parts import table as parts
        from shoal.ir import kind_named

        own = super().get_command(ctx, name)
        if own is not None:
            return own
        known = [*self.commands, *parts("job")]
        if name not in known:
            if ctx.resilient_parsing:
                return None
            hint = nearest(name, known)
            raise UnknownPartError(
                f"shoal {ctx.info_name} {name}: expected one of {', '.join(sorted({*known}))}"
                + (f"; {hint}" if hint else "")
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


app = typer.Typer(cls=Kinds, help="Run a job of any kind, and keep score.", no_args_is_help=True)


# What was asked here is explained now.
moved = typer.Typer(cls=StudyGroup, hidden=True, help="Now shoal explain.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Run a job of any kind: plan it, do it, report prediction beside measurement."""


def option(name: str, annotation: Any, default: Any, text: str, *words: str) -> inspect.Parameter:
    """A keyword whose words on the command line are ``words``, or follow from its name."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[annotation, typer.Option(*words, help=text)],
    )


def _command(
    kind: JobKind, text: str, options: list[inspect.Parameter], do: Callable[..., None]
) -> Callable[..., None]:
    """A function whose signature has the kind's flags, as typer reads it."""
    subject = inspect.Parameter(
        "subject",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[
            str | None, typer.Argument(help=f"The job's {kind.subject}, or a job in YAML.")
        ],
    )
    flags = [option(flag.name, str | None, None, flag.help) for flag in kind.flags]

    def command(**given: Any) -> None:
        do(**given)

    parameters = [subject, *flags, *options]
    command.__doc__ = text
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


_MACHINE = option(
    "machine", str, "local", "local, 16xH100, 8xA100@IB200, or a file.", "--machine", "-m"
)
_SET = option("set_", list[str] | None, None, "path=value, over everything else.", "--set")
_OUTPUT = option("output", Format, Format.text, "text or json.", "--output", "-o")


def plan_command(name: str, kind: JobKind) -> Callable[..., None]:
    """``shoal plan KIND`` of one kind."""

    def do(
        *,
        subject: str | None,
        machine: str,
        set_: list[str] | None,
        top: int,
        out: Path | None,
        output: Format,
        **flags: str | None,
    ) -> None:
        from shoal.machine.described import load

        job = _job(name, kind, subject, flags, set_ or [], "plan").value
        plans = list(kind.plan(job, load(machine)))[:top]
        if out is not None:
            plans[0].save(out, header=f"The best plan; run it with shoal run {name} --plan.")
            typer.echo(f"saved {out}", err=True)
        if output is Format.json:
            as_json([plan.model_dump(mode="json", exclude_none=True) for plan in plans])
        else:
            show_job_plans(kind, plans)

    options = [
        _MACHINE,
        _SET,
        option("top", int, 5, "Plans to show."),
        option("out", Path | None, None, "Save the best plan."),
        _OUTPUT,
    ]
    text = f"""Predict what it costs to {kind.summary}; nothing runs.

    **Examples**

        shoal plan {name} job.yaml

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
        from shoal.app.show import TrainingBar, say_if_slower
        from shoal.machine.described import load

        resolved: ResolvedValue[Job] | None = None
        given = subject is not None or bool(set_) or any(v is not None for v in flags.values())
        old = directory / "plan.yaml" if directory is not None and resume else None
        if plan is not None:
            chosen = _saved(name, kind, plan)
        elif old is not None and old.exists() and not given:
            chosen = _saved(name, kind, old)
        else:
            resolved = _job(name, kind, subject, flags, set_ or [], "run")
            chosen = kind.plan(resolved.value, load(machine))[0]
        directory = directory or Path("runs") / chosen.job.name
        if dry_run:
            if resolved is not None and output is Format.text:
                table("configuration", ("key", "value", "why"), list(resolved.lines()))
            _show_plan(kind, chosen, output)
            return
        say_if_slower()
        with (
            continuable(f"run {name}", directory),
            TrainingBar(quiet=quiet, before=name) as bar,
        ):
            report = kind.run(chosen, directory, resume=resume, watch=bar, anyway=anyway)
        show_report(report, directory, output)

    options = [
        option("plan", Path | None, None, "Run this plan of shoal plan --out."),
        option("directory", Path | None, None, "Where it runs; runs/NAME if not given.", "--dir"),
        _MACHINE,
        _SET,
        option("resume", bool, False, "Go on with the run that lies there.", "--resume"),
        option("dry_run", bool, False, "Show job and plan; run nothing.", "--dry-run"),
        option("anyway", bool, False, "Run here what is planned for another device.", "--anyway"),
        option("quiet", bool, False, "Print the result only.", "--quiet", "-q"),
        _OUTPUT,
    ]
    text = f"""Plan and {kind.summary}; report prediction beside measurement.

    **Examples**

        shoal run {name} job.yaml

        shoal run {name} --dir runs/{name} --resume

        shoal run {name} job.yaml --dry-run -o json
    """
    return _command(kind, text, options, do)


def _job(
    name: str,
    kind: JobKind,
    subject: str | None,
    flags: Mapping[str, str | None],
    sets: list[str],
    verb: str,
) -> ResolvedValue[Job]:
    """The job of the kind that a file, a subject and flags describe.

    Raises:
        ConfigError: names what is wrong.
    """
    from shoal.core.config import resolve
    from shoal.core.files import parse_yaml

    file = None
    values: dict[str, object] = {}
    if subject is not None and subject.endswith((".yaml", ".yml")):
        file = Path(subject)
        same_kind(name, file, verb)
    elif subject is not None:
        values[kind.subject] = subject
    for flag in kind.flags:
        text = flags[flag.name]
        if text is not None:
            values[flag.path] = (
                parse_yaml(text, f"--{flag.name}") if flag.read is None else flag.read(text)
            )
    return resolve(kind.job_type, file=file, flags=values, sets=sets)


def same_kind(kind: str, file: Path | None, verb: str) -> None:
    """Refuse the file of another kind of job: its keys would be refused one by one.

    Raises:
        ConfigError: it is of another kind; says which command takes it.
    """
    from shoal.core.errors import ConfigError
    from shoal.core.files import read_yaml

    if file is None:
        return
    raw = read_yaml(file)
    said = raw.get("job", kind) if isinstance(raw, dict) else kind
    if said != kind:
        raise ConfigError(
            f"{file}: a job of kind {said}, not {kind}; use shoal {verb} {said} {file}"
        )


def _saved(name: str, kind: JobKind, path: Path) -> Plan[Any]:
    """The plan in a file.

    Raises:
        ConfigError: it is none, or of another kind of job.
    """
    from shoal.core.errors import ConfigError
    from shoal.plan.saved import read_plan

    plan = read_plan(path)
    if not isinstance(plan, kind.plan_type):
        other = plan.job.job
        raise ConfigError(
            f"{path}: a plan of a job of kind {other}, not {name}; use shoal run {other} --plan"
        )
    return plan


@contextlib.contextmanager
def continuable(command: str, directory: Path, more: str = "") -> Iterator[None]:
    """Say how a run goes on that a signal has stopped; ``more`` are other words of its command."""
    try:
        yield
    except KeyboardInterrupt:
        if (directory / "plan.yaml").exists():
            typer.echo(f"continue with: shoal {command} --dir {directory} --resume{more}", err=True)
        raise


def _show_plan(kind: JobKind, plan: Plan[Any], output: Format) -> None:
    if output is Format.json:
        as_json(plan.model_dump(mode="json", exclude_none=True))
    else:
        show_job_plans(kind, [plan])


def show_job_plans(kind: JobKind, plans: list[Plan[Any]]) -> None:
    """Print ranked plans of any kind, and everything that the best one predicts."""
    from shoal.app.show import show_estimate

    best = plans[0]
    headline = next((one for one in kind.quantities if one.headline), None)
    if len(plans) > 1 and headline is not None:
        rows = []
        for plan in plans:
            value = kind.predictions(plan).get(headline.name)
            fits = "yes" if plan.fits else "no"
            shown = "" if value is None else headline.text(value.value)
            rows.append((kind.describe(plan), fits, shown))
        table("plans, best first", ("plan", "fits", headline.label), rows, numeric="  r")
    predicted = kind.predictions(best)
    table(
        f"{kind.describe(best)} on {best.machine.name}",
        ("", "predicted", "90 % interval"),
        [
            (
                one.label,
                one.text(value.value),
                f"{one.text(value.low)} to {one.text(value.high)}"
                if value.low < value.high
                else "",
            )
            for one in kind.quantities
            if (value := predicted.get(one.name)) is not None
        ],
        numeric=" rr",
    )
    show_estimate(best.estimate)
    if best.why:
        typer.echo(best.why)
    if not best.fits:
        typer.echo("it does not fit")
    for note in best.notes:
        typer.echo(f"note: {note}")


def show_report(report: Report[Any], directory: Path, output: Format = Format.text) -> None:
    """Print prediction beside measurement, and what the run left behind."""
    from shoal.ir import compared, kind_of

    if output is Format.json:
        as_json(report.model_dump(mode="json", exclude_none=True))
        return
    table(
        "prediction beside measurement",
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
