"""What is known of a part or a kind of parts: its options, its traits, its papers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.core.bounds import allowed
from shoal.core.errors import UnknownPartError, suggestion
from shoal.core.parts import KINDS, meanings, table
from shoal.core.tables import Table, without_empty
from shoal.core.traits import TRAITS, traits
from shoal.ir import Explanation

# Kinds whose parts have a verb of their own.
_ELSEWHERE = ("job", "claim")


def explained_kinds() -> list[str]:
    """The kinds whose parts are explained."""
    return [kind for kind in KINDS if kind not in _ELSEWHERE]


def find_parts(name: str) -> list[tuple[str, str | None]]:
    """Kinds and parts that ``KIND.PART``, a part's name or a kind's name stands for.

    Returns:
        The kind and the part, which is None for the kind itself; several where parts of several
        kinds are called so, in the order of the kinds. A study is of kind ``study``.

    Raises:
        UnknownPartError: nothing is called so.
    """
    word = name.replace("-", "_")
    if word in table("study"):
        return [("study", word)]
    kind, _, part = name.partition(".")
    if part and kind in KINDS:
        return [(kind, part)]
    holding = [kind for kind in explained_kinds() if name in table(kind)]
    if holding:
        return [(kind, name) for kind in holding]
    if name in KINDS:
        return [(name, None)]
    known = {one for kind in explained_kinds() for one in table(kind)} | set(KINDS)
    raise UnknownPartError(
        f"explain {name}: there is no such part or kind; shoal explain lists them"
        + suggestion(name, known)
    )


def explain_parts(parts: Sequence[tuple[str, str | None]]) -> Explanation:
    """A kind, a part, or several parts of one name, each under its full name.

    Raises:
        UnknownPartError: a kind has no such part.
    """
    results = [
        explain_kind(kind) if part is None else explain_part(kind, part) for kind, part in parts
    ]
    if len(results) == 1:
        return results[0]
    blocks: list[Table | str] = [f"{len(parts)} parts have this name."]
    for (kind, part), result in zip(parts, results, strict=True):
        blocks += ["", f"{kind}.{part}", *result.blocks]
    return Explanation(blocks=tuple(blocks))


def explain_kind(kind: str) -> Explanation:
    """The parts of a kind, each with its first line."""
    rows = tuple((name, first_line(table(kind).load(name))) for name in table(kind))
    return Explanation(blocks=(Table(title=f"parts of kind {kind}", columns=("", ""), rows=rows),))


def explain_part(kind: str, name: str) -> Explanation:
    """What a part does, its options and traits, and what its papers claim.

    Raises:
        UnknownPartError: the kind has no such part.
    """
    cls = table(kind).load(name, where=f"explain {kind}")
    result, within = meanings(cls), allowed(cls)
    rows = [
        (field.name, default_of(field), within.get(field.name, ""), result.get(field.name, ""))
        for field in dataclasses.fields(cls)
    ]
    head = ("option", "default", "allowed", "meaning")
    options = [without_empty(f"options of {kind} {name}", head, rows, "")] if rows else []
    known = [f"{one}: {TRAITS.get(one, '')}".rstrip(": ") for one in sorted(traits(kind, name))]
    place = f"{cls.__module__}:{cls.__qualname__}"
    papers = _papers(name, cls.__module__.removeprefix("shoal."))
    return Explanation(blocks=(prose(cls), *options, *known, *papers, place))


def first_line(cls: type[Any]) -> str:
    """What a part does, in a line."""
    return inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]


def prose(cls: type[Any]) -> str:
    """What a part's documentation says before its options."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return text.partition("\nArgs:")[0].strip()


def default_of(field: dataclasses.Field[Any]) -> str:
    """The default of an option; empty if it has none."""
    if field.default is dataclasses.MISSING:
        return "" if field.default_factory is dataclasses.MISSING else str(field.default_factory())
    return "none" if field.default is None else str(field.default)


def _papers(name: str, module: str) -> Iterator[str]:
    """What the papers say whose system is a part, or has it, and what was measured."""
    from shoal.claims.catalogue import catalogue
    from shoal.claims.shipped import results_directory
    from shoal.claims.standing import standing

    for row in catalogue():
        if row.claim != name and module not in row.parts:
            continue
        yield f"[{row.id}] {row.name}, {row.year}: {row.says}"
        result = standing(row, results_directory()).record
        if result is not None:
            yield f"  here: {result.verdict.status}"
        if row.claim is not None:
            yield f"  test it on this machine: shoal claims run {row.claim}"
