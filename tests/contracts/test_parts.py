"""One battery over every registered part, whoever wrote it.

A new part is covered by being listed in its room's table; nothing has to be added here.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from shoal.core.errors import ConfigError, UnknownKeyError
from shoal.core.parts import KINDS, Choice, PartTable, load_object, options_of, table

from .conftest import EXAMPLES, PARTS, choice

# Kinds whose parts are techniques somebody published.
SOURCED = ("family", "law", "peft", "optimizer", "lr_schedule", "shard", "packing")


def each_part(check: Callable[[str, str], None]) -> Callable[[], None]:
    """A test that checks every part, and names those that fail, each with its reason."""

    def test() -> None:
        complaints = {}
        for kind, name in PARTS:
            try:
                check(kind, name)
            except (Exception, pytest.fail.Exception) as error:
                line = traceback.extract_tb(error.__traceback__)[1].lineno
                complaints[f"{kind}.{name}"] = f"line {line}: {type(error).__name__}: {error}"
        assert not complaints, "\n".join(f"{part}: {said}" for part, said in complaints.items())

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


def build(kind: str, name: str) -> Any:
    return table(kind).build(choice(kind, name))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_table(kind: str) -> None:
    result = table(kind)
    assert isinstance(result, PartTable)
    assert result.kind == kind
    assert len(result) >= 1
    assert result.protocol, "no protocol"
    assert result.about, "nothing for the reference"
    module, _, attribute = KINDS[kind].partition(":")
    assert getattr(sys.modules[module], attribute) is result


def test_no_room_hides_a_table() -> None:
    """Every table of a room is a kind."""
    for module in sorted({place.partition(":")[0] for place in KINDS.values()}):
        for attribute, result in vars(importlib.import_module(module)).items():
            if isinstance(result, PartTable):
                assert KINDS.get(result.kind) == f"{module}:{attribute}"


def test_each_is_named_by_its_technique() -> None:
    def proper(kind: str, name: str) -> bool:
        # 1f1b is the field's own name; a kernel is called by its operator, then by how it
        # computes it.
        dotted = r"(\.[a-z0-9_]+)" if kind == "kernel" else ""
        named = re.fullmatch(r"[a-z0-9][a-z0-9_]*" + dotted, name)
        return bool(named and re.fullmatch(r"[\w.]+:[A-Z]\w*", table(kind)[name]))

    assert [f"{kind}.{name}" for kind, name in PARTS if not proper(kind, name)] == []


def test_each_builds_without_torch(without_torch: dict[str, dict[str, str]]) -> None:
    """Imports, builds and, where a job chooses it, estimates; deterministic, allocating nothing."""
    complaints = {
        f"{kind}.{name}": without_torch["parts"][f"{kind}.{name}"] for kind, name in PARTS
    }
    assert {part: said for part, said in complaints.items() if said} == {}


@each_part
def test_needs_only_the_options_that_have_no_default(kind: str, name: str) -> None:
    needed = {
        field.name
        for field in dataclasses.fields(table(kind).load(name))
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    assert needed == set(EXAMPLES.get((kind, name), {}))
    for option in needed:
        rest = {key: value for key, value in choice(kind, name).items() if key != option}
        with pytest.raises(ConfigError, match=rf"{kind}\.{name}\.{option}: missing"):
            table(kind).build(rest)


def test_examples_are_of_parts_that_exist() -> None:
    assert set(EXAMPLES) <= set(PARTS)


@each_part
def test_is_frozen_and_keyword_only(kind: str, name: str) -> None:
    instance = build(kind, name)
    parameters = dataclasses.fields(instance)
    assert all(field.kw_only for field in parameters)
    attribute = parameters[0].name if parameters else "anything"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(instance, attribute, None)


@each_part
def test_reads_and_writes_config(kind: str, name: str) -> None:
    instance = build(kind, name)
    spelled = table(kind).spell(instance)
    written = json.loads(json.dumps(spelled.model_dump(mode="json")))
    again = table(kind).build(Choice.model_validate(written))
    assert again == instance
    assert repr(again) == repr(instance)
    for option in options_of(type(instance)):
        assert f"{option}=" in repr(instance)
    # Options at their defaults are left out, so that a config shows what was decided.
    assert spelled.name == name
    assert set(spelled.options) == set(EXAMPLES.get((kind, name), {}))


@each_part
def test_refuses_an_unknown_option(kind: str, name: str) -> None:
    options = options_of(table(kind).load(name))
    wrong = f"{options[-1]}x" if options else "anything"
    with pytest.raises(UnknownKeyError, match=rf"{kind}\.{name}\.{wrong}: no such key") as caught:
        table(kind).build({**choice(kind, name), wrong: 1})
    if options:
        assert "did you mean" in str(caught.value)
        assert all(option in str(caught.value) for option in options)


@each_part
def test_refuses_an_option_of_the_wrong_type(kind: str, name: str) -> None:
    cls = table(kind).load(name)
    for option in options_of(cls):
        with pytest.raises(ConfigError, match=rf"{kind}\.{name}\.{option}"):
            table(kind).build({**choice(kind, name), option: {"not": ["an", "option"]}})


@each_part
def test_keeps_the_promises_of_its_kind(kind: str, name: str) -> None:
    protocol = load_object(table(kind).protocol)
    cls = table(kind).load(name)
    promised = [
        (method, function)
        for method, function in vars(protocol).items()
        if inspect.isfunction(function) and not method.startswith("_")
    ]
    assert promised, f"{table(kind).protocol} promises nothing"
    for attribute in vars(protocol).get("__annotations__", {}):
        assert hasattr(cls, attribute), f"no attribute {attribute}"
    for method, function in promised:
        assert callable(getattr(cls, method, None)), f"no method {method}"
        expected = list(inspect.signature(function).parameters.values())
        actual = inspect.signature(getattr(cls, method)).parameters
        for parameter in expected[1:]:
            assert parameter.name in actual, f"{method} takes no {parameter.name}"
            assert actual[parameter.name].kind == parameter.kind
        extra = set(actual) - {parameter.name for parameter in expected} - {"self"}
        assert all(actual[key].default is not inspect.Parameter.empty for key in extra)


@each_part
def test_is_documented(kind: str, name: str) -> None:
    """The class says what it is and each option; the file names its source."""
    cls = table(kind).load(name)
    text = inspect.getdoc(cls) or ""
    assert text and not text.startswith(f"{cls.__name__}("), "no docstring"
    first = text.splitlines()[0]
    assert len(first) > 10
    # Options may be told where they are declared, in what the part builds on.
    result = "\n".join(inspect.cleandoc(base.__doc__ or "") for base in cls.__mro__)
    for option in options_of(cls):
        assert re.search(rf"^\s+{option}: \S", result, re.MULTILINE), f"option {option} is not told"
    if kind in SOURCED:
        everything = f"{sys.modules[cls.__module__].__doc__}\n{text}"
        assert re.search(r"Source: .*\b(19|20)\d\d\b", everything, re.DOTALL), "no source"
