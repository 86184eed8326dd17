"""``shoal explain``: the one face of every technique."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from shoal.app.commands.jobs import option
from shoal.app.show import Format, WorkBar, as_json, show, table

__all__ = ["PartCommands", "app", "explained"]

# Kinds whose parts have a command of their own.
_ELSEWHERE = ("job", "claim")


class PartCommands(TyperGroup):
    """A command for each study and each part, made when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The studies; parts are listed without an argument."""
        from shoal.core.parts import table as parts

        return list(parts("study"))

    def get_command(self, ctx: Any, name: str) -> Any:
        """The command of a study, a part, ``KIND.PART``, or a kind."""
        from shoal.core.errors import UnknownPartError

        try:
            result = explained(name)
        except UnknownPartError:
            if ctx.resilient_parsing:  # a shell completes a line
                return None
            raise
        single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        single.command(name)(result)
        return typer.main.get_command(single)

    @staticmethod
    def action(name: str) -> Callable[..., None]:
        """What explains a study."""
        return _study_command(name)


app = typer.Typer(cls=PartCommands, invoke_without_command=True)


@app.callback()
def explain(context: typer.Context) -> None:
    """Explain a technique: its options, what it costs here, its table or picture.

    Without an argument every part is listed.

    **Examples**

        shoal explain

        shoal explain zbv

        shoal explain fold --help
    """
    if context.invoked_subcommand is None:
        _list_all()


def _kinds() -> list[str]:
    from shoal.core.parts import KINDS

    return [kind for kind in KINDS if kind not in _ELSEWHERE]


def _list_all() -> None:
    from shoal.core.parts import table as parts

    for kind in _kinds():
        rows = [(name, _first_line(parts(kind).load(name))) for name in parts(kind)]
        table(kind, ("", ""), rows)


def _first_line(cls: type[Any]) -> str:
    return inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]


def explained(name: str) -> Callable[..., None]:
    """What explains ``name``.

    Raises:
        UnknownPartError: nothing is called so, or several parts are.
    """
    from shoal.core.errors import UnknownPartError, nearest
    from shoal.core.parts import KINDS
    from shoal.core.parts import table as parts

    word = name.replace("-", "_")
    if word in parts("study"):
        return _study_command(word)
    kind, _, part = name.partition(".")
    if part and kind in KINDS:
        return _part_command(kind, part)
    holding = [kind for kind in _kinds() if name in parts(kind)]
    if len(holding) == 1:
        return _part_command(holding[0], name)
    if holding:
        spelled = " or ".join(f"{kind}.{name}" for kind in holding)
        raise UnknownPartError(f"explain {name}: parts of {len(holding)} kinds; say {spelled}")
    if name in KINDS:
        return _kind_command(name)
    known = {one for kind in _kinds() for one in parts(kind)} | set(KINDS)
    hint = nearest(name, known)
    raise UnknownPartError(
        f"explain {name}: there is no such part or kind; shoal explain lists them"
        + (f"; {hint}" if hint else "")
    )


def _kind_command(kind: str) -> Callable[..., None]:
    from shoal.core.parts import table as parts

    def command() -> None:
        rows = [(name, _first_line(parts(kind).load(name))) for name in parts(kind)]
        table(f"parts of kind {kind}", ("", ""), rows)

    command.__doc__ = f"List the parts of kind {kind}."
    return command


def _part_command(kind: str, name: str) -> Callable[..., None]:
    from shoal.core.bounds import allowed
    from shoal.core.parts import meanings
    from shoal.core.parts import table as parts
    from shoal.core.traits import TRAITS, traits

    cls = parts(kind).load(name, where=f"explain {kind}")

    def command() -> None:
        typer.echo(_prose(cls))
        result, within = meanings(cls), allowed(cls)
        head = ("option", "default", *(["allowed"] if within else []), "meaning")
        rows = [
            (
                field.name,
                _default_of(field),
                *([within.get(field.name, "")] if within else []),
                result.get(field.name, ""),
            )
            for field in dataclasses.fields(cls)
        ]
        if rows:
            table(f"options of {kind} {name}", head, rows)
        for trait in sorted(traits(kind, name)):
            typer.echo(f"{trait}: {TRAITS.get(trait, '')}".rstrip(": "))
        for line in _papers(name, cls.__module__.removeprefix("shoal.")):
            typer.echo(line)
        typer.echo(f"{cls.__module__}:{cls.__qualname__}")

    command.__doc__ = _first_line(cls)
    return command


def _papers(name: str, module: str) -> Iterator[str]:
    """What the papers say whose system is a part, or has it, and what was measured."""
    from shoal.claims.catalogue import catalogue
    from shoal.claims.standing import standing

    for row in catalogue():
        if row.claim != name and module not in row.parts:
            continue
        yield f"[{row.id}] {row.name}, {row.year}: {row.says}"
        result = standing(row).record
        if result is not None:
            yield f"  here: {result.verdict.status}"
        if row.claim is not None:
            yield f"  judge it on this machine: shoal claims run {row.claim}"


def _prose(cls: type[Any]) -> str:
    text = inspect.cleandoc(cls.__doc__ or "")
    return text.partition("\nArgs:")[0].strip()


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "" if field.default_factory is dataclasses.MISSING else str(field.default_factory())
    return "none" if field.default is None else str(field.default)


def _study_command(name: str) -> Callable[..., None]:
    """A function whose signature has the fields of a study, as typer reads it."""
    from shoal.core.parts import meanings
    from shoal.core.parts import table as parts

    cls = parts("study").load(name)
    result, hints = meanings(cls), get_type_hints(cls)
    fields = dataclasses.fields(cls)
    named = getattr(cls, "subject", ())
    subject = (named,) if isinstance(named, str) else named

    def command(
        *,
        machine: str | None = None,
        picture: Path | None,
        out: Path | None,
        output: Format,
        **given: Any,
    ) -> None:
        from shoal.machine.described import load

        options = {
            field.name: _value(field.name, hints[field.name], given[field.name])
            for field in fields
            if given[field.name] not in (None, [])
        }
        study = parts("study").build({"name": name, **options}, where="explain")
        with WorkBar(name, quiet=output is Format.json) as bar:
            answer = study.explain(None if machine is None else load(machine), bar)
        _write(answer, picture, out)
        if output is Format.json:
            as_json(answer.as_json())
        else:
            for block in answer.blocks:
                if isinstance(block, str):
                    typer.echo(block)
                else:
                    show(block)
        raise typer.Exit(0 if answer.ok else 1)

    parameters = [_parameter(field, hints[field.name], result, subject) for field in fields]
    needed = getattr(cls, "machine", "local")
    if needed is not None:
        parameters.append(
            option("machine", str | None, needed or None, "What it is for.", "--machine", "-m")
        )
    parameters += [
        option("picture", Path | None, None, "Draw it into this file."),
        option("out", Path | None, None, "Directory for its files."),
        option("output", Format, Format.text, "text or json.", "--output", "-o"),
    ]
    parameters.sort(key=lambda one: one.kind)
    command.__doc__ = _prose(cls)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _parameter(
    field: dataclasses.Field[Any], hint: Any, given: dict[str, str], subject: tuple[str, ...]
) -> inspect.Parameter:
    text = given.get(field.name, "")
    if field.name in subject:
        kind: Any = list[str] if hint == tuple[str, ...] else str
        return inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=Annotated[kind | None, typer.Argument(help=text)],
        )
    if hint is bool:
        name = field.name.replace("_", "-")
        words = typer.Option(f"--{name}/--no-{name}", help=text)
        return inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[bool | None, words],
        )
    default = _default_of(field)
    text += f" [default: {default}]" if default and default != "none" else ""
    if hint == tuple[str, ...]:
        return option(field.name, list[str] | None, None, text + " Repeatable.")
    return option(field.name, str | None, None, text)


def _value(name: str, hint: Any, given: Any) -> Any:
    """What was given, as YAML reads it unless the field holds text."""
    from shoal.core.files import parse_yaml

    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not isinstance(given, str) or {*kinds} & {str, Path}:
        return given
    return parse_yaml(given, f"--{name.replace('_', '-')}")


def _write(answer: Any, picture: Path | None, out: Path | None) -> None:
    """Write the picture and the files that were asked for.

    Raises:
        ConfigError: there is none.
    """
    from shoal.core.errors import ConfigError
    from shoal.core.files import write_atomic

    texts: dict[Path, str] = {}
    if picture is not None:
        if not answer.picture:
            raise ConfigError("--picture: nothing is drawn here; leave it out")
        texts[picture] = _text(answer.picture)
    if out is not None:
        if not answer.files:
            raise ConfigError("--out: nothing is saved here; leave it out")
        texts |= {out / name: _text(text) for name, text in answer.files.items()}
    # All are made before the first is written.
    for path, text in texts.items():
        write_atomic(path, text, error=ConfigError)
        typer.echo(f"wrote {path}", err=True)


def _text(text: str | Callable[[], str]) -> str:
    return text() if callable(text) else text
