"""``shoal explain``: the one face of every technique."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from shoal.app.commands.jobs import option
from shoal.app.show import (
    Format,
    Output,
    WorkBar,
    as_json,
    check_endings,
    show_blocks,
    table,
)


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

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Studies and parts, and parts by ``KIND.PART``."""
        from typer.core import CompletionItem  # type: ignore[attr-defined]

        from shoal.api.explaining import explained_kinds
        from shoal.core.parts import table as parts

        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        every = list(dict.fromkeys(name for kind in explained_kinds() for name in parts(kind)))
        every += [f"{kind}.{name}" for kind in explained_kinds() for name in parts(kind)]
        found = [*parts("study"), *every]
        return [CompletionItem(name) for name in found if name.startswith(incomplete)]

    @staticmethod
    def action(name: str) -> Callable[..., None]:
        """What explains a study."""
        return _study_command(name)


app = typer.Typer(cls=PartCommands, invoke_without_command=True)


@app.callback()
def explain(context: typer.Context, output: Output = Format.text) -> None:
    """Explain a technique: its options, what it costs here, its table or picture.

    Without an argument every part is listed.

    **Examples**

        shoal explain

        shoal explain medusa                 # of each kind that has one

        shoal explain fold --help
    """
    if context.invoked_subcommand is None:
        _list_all(output)


def _list_all(output: Format) -> None:
    from shoal.api.explaining import explained_kinds, first_line
    from shoal.core.parts import table as parts

    lines = {
        kind: {name: first_line(parts(kind).load(name)) for name in parts(kind)}
        for kind in explained_kinds()
    }
    if output is Format.json:
        as_json(lines)
        return
    for kind, of in lines.items():
        table(kind, ("", ""), of.items())


def explained(name: str) -> Callable[..., None]:
    """What explains ``name``.

    Raises:
        UnknownPartError: nothing is called so.
    """
    from shoal.api.explaining import explain_parts, find_parts, first_line
    from shoal.core.parts import table as parts

    found = find_parts(name)
    kind, part = found[0]
    if kind == "study" and part is not None:
        return _study_command(part)

    def command(output: Output = Format.text) -> None:
        answer = explain_parts(found)
        if output is Format.json:
            as_json(answer.as_json())
        else:
            show_blocks(answer.blocks)

    command.__doc__ = (
        f"List the parts of kind {kind}."
        if part is None
        else first_line(parts(kind).load(part, where=f"explain {kind}"))
    ) + f"\n\n**Examples**\n\n    shoal explain {name}\n\n    shoal explain {name} -o json\n"
    return command


def _study_command(name: str) -> Callable[..., None]:
    """A function whose signature has the fields of a study, as typer reads it."""
    from shoal.api.explaining import prose
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
        quiet: bool,
        **given: Any,
    ) -> None:
        from shoal.machine.described import load

        check_endings("--picture", [picture], ".svg", ".html")
        options = {
            field.name: _value(field.name, hints[field.name], given[field.name])
            for field in fields
            if given[field.name] not in (None, [])
        }
        study = parts("study").build({"name": name, **options}, where="explain")
        with WorkBar(name, quiet=quiet or output is Format.json) as bar:
            answer = study.explain(None if machine is None else load(machine), bar)
        _write(answer, picture, out)
        if output is Format.json:
            as_json(answer.as_json())
        else:
            show_blocks(answer.blocks)
        raise typer.Exit(0 if answer.ok else 1)

    parameters = [_parameter(field, hints[field.name], result, subject) for field in fields]
    needed = getattr(cls, "machine", "local")
    if needed is not None:
        parameters.append(
            option(
                "machine",
                str | None,
                needed or None,
                "Machine to explain it for.",
                "--machine",
                "-m",
            )
        )
    parameters += [
        option("picture", Path | None, None, "Write the picture to this .svg or .html file."),
        option("out", Path | None, None, "Directory for output files."),
        option("output", Format, Format.text, "text or json.", "--output", "-o"),
        option("quiet", bool, False, "No progress.", "--quiet", "-q"),
    ]
    parameters.sort(key=lambda one: one.kind)
    command.__doc__ = prose(cls)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _parameter(
    field: dataclasses.Field[Any], hint: Any, given: dict[str, str], subject: tuple[str, ...]
) -> inspect.Parameter:
    from shoal.api.explaining import default_of

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
    default = default_of(field)
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
    """Write the picture and the files that were asked for."""
    from shoal.core.errors import ConfigError
    from shoal.core.files import write_atomic

    texts: dict[Path, str] = {}
    if picture is not None:
        if not answer.picture:
            raise ConfigError("--picture: this has no picture; leave it out")
        texts[picture] = text = _text(answer.picture)
        svg = text.lstrip().startswith("<svg")
        check_endings("--picture", [picture], ".svg" if svg else ".html")
    if out is not None:
        if not answer.files:
            raise ConfigError("--out: this writes no files; leave it out")
        texts |= {out / name: _text(text) for name, text in answer.files.items()}
    # All are made before the first is written.
    for path, text in texts.items():
        write_atomic(path, text, error=ConfigError)
        typer.echo(f"wrote {path}", err=True)


def _text(text: str | Callable[[], str]) -> str:
    return text() if callable(text) else text
