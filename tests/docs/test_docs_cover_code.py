"""Every command, option, part, key, event, counter and error is documented."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sources
import typer
from docs_pages import DOCS, ROOT
from mkdocs.utils import yaml_load

from shoal.app.cli import app
from shoal.core import errors
from shoal.core.parts import KINDS, table
from shoal.ir import kind_named, kinds

PACKAGE = ROOT / "src" / "shoal"


def _rooms(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if (path / "__init__.py").exists())


ROOMS, FIELDS = _rooms(PACKAGE), _rooms(PACKAGE / "fields")


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, (*words, name))


COMMANDS = list(_commands(typer.main.get_command(app), ("shoal",)))
LEAVES = [(words, command) for words, command in COMMANDS if not hasattr(command, "commands")]


@pytest.mark.parametrize(("words", "command"), LEAVES, ids=[" ".join(w) for w, _ in LEAVES])
def test_every_command_and_option_is_in_the_reference(words: tuple[str, ...], command: Any) -> None:
    text = (DOCS / "reference" / "cli.md").read_text()
    section = text.partition(f"## {' '.join(words)}\n")[2].partition("\n## ")[0]
    assert section, f"no section for {' '.join(words)}"
    assert "```shell" in section, f"{' '.join(words)} has no example"
    for parameter in command.params:
        for spelling in (*parameter.opts, *parameter.secondary_opts):
            shown = spelling if spelling.startswith("-") else spelling.upper()
            assert f"`{shown}`" in section, f"{' '.join(words)}: {shown}"


PARTS = [(kind, name) for kind in KINDS for name in table(kind)]


def _undocumented_parts() -> Iterator[str]:
    """What is missing of each part: its section, the meaning of an option, or advice."""
    pages = sorted((DOCS / "reference" / "parts").glob("*.md"))
    texts = {page.stem: page.read_text() for page in pages}
    places = (DOCS / "rooms", DOCS / "data")
    advice = "".join(page.read_text() for place in places for page in sorted(place.glob("*.md")))
    for kind, name in PARTS:
        anchor = f"{kind}-{name.replace('_', '-').replace('.', '-')}"
        room = KINDS[kind].split(":")[0].split(".")[1]
        text = texts.get(room, "")
        section = text.partition(f"{{#{anchor}}}\n")[2].partition("\n### ")[0].partition("\n## ")[0]
        if not section:
            yield f"no section for {kind} {name}"
        for option in dataclasses.fields(table(kind).load(name)):
            row = re.search(rf"^\| `{option.name}` \|.*\| ([^|]*) \|$", section, re.M)
            if row is None:
                yield f"{kind} {name}: option {option.name} is missing"
            elif not row.group(1).strip():
                yield f"{kind} {name}: say in Args what {option.name} means"
        if f"parts/{room}.md#{anchor})" not in advice:
            yield f"{kind} {name}: add a row to 'which part should I choose' on its room's page"


def test_every_part_and_option_is_documented() -> None:
    assert list(_undocumented_parts()) == []


@pytest.mark.parametrize("name", sorted(kinds()))
def test_every_key_of_a_job_is_documented(name: str) -> None:
    job, title = kind_named(name).job_type, f"Job {name}"
    whole = (DOCS / "reference" / "configuration.md").read_text()
    text = whole.partition(f"## {title}\n")[2].partition("\n## ")[0]

    def keys(cls: Any, prefix: str = "") -> Iterator[str]:
        for name, info in cls.model_fields.items():
            inner = info.annotation
            if isinstance(inner, type) and inner.__module__.startswith("shoal.ir."):
                yield from keys(inner, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    for key in keys(job):
        row = re.search(rf"^\| `{re.escape(key)}` \|.*\| ([^|]*) \|$", text, re.M)
        assert row, f"{key} is missing"
        assert row.group(1).strip(), f"{key} has no meaning; add it to Args of its class"


def _calls() -> Iterator[ast.Call]:
    for path in sources.paths():
        for node in sources.nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                yield node


def _words(node: ast.expr) -> Iterator[str]:
    """The texts that an argument may be."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _words(node.body)
        yield from _words(node.orelse)


def _is_meter(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("meter", "_meter", "run", "_run")


def test_every_event_counter_and_tag_is_documented() -> None:
    text = (DOCS / "reference" / "events.md").read_text()
    kinds = set()
    for call in _calls():
        assert isinstance(call.func, ast.Attribute)
        if call.func.attr == "event" and _is_meter(call.func.value):
            for kind in _words(call.args[0]):
                kinds.add(kind)
                section = text.partition(f"### {kind}\n")[2].partition("\n### ")[0]
                assert section, f"event {kind} is not documented"
                for keyword in call.keywords:
                    if keyword.arg is not None:
                        assert f"| `{keyword.arg}` |" in section, f"event {kind}: {keyword.arg}"
        elif call.func.attr in ("add", "gauge") and _is_meter(call.func.value):
            for name in _words(call.args[0]):
                assert f"| `{name}` |" in text, f"{call.func.attr} {name} is not documented"
        for keyword in call.keywords:
            if keyword.arg == "tag":
                for tag in _words(keyword.value):
                    assert f"| `{tag}` |" in text, f"tag {tag} is not documented"
    assert {"start", "step", "checkpoint", "eval", "sample", "end", "stop"} <= kinds


def test_every_error_is_documented() -> None:
    text = (DOCS / "reference" / "errors.md").read_text()
    for name in errors.__all__:
        if isinstance(getattr(errors, name), type):
            assert f"| `{name}` |" in text
            assert re.search(rf"(── |^){name}\b", text, re.M), f"{name} is not in the tree"


def test_every_room_has_a_page_and_a_row() -> None:
    pages = sorted(page.stem for page in (DOCS / "rooms").glob("*.md"))
    assert pages == sorted([*ROOMS, *FIELDS])
    for name in ("CONTRIBUTING.md", "docs/architecture.md"):
        text = (ROOT / name).read_text()
        for room in ROOMS:
            assert f"rooms/{room}.md" in text


def test_every_extra_is_on_the_first_page() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "index.md").read_text(), re.M)
    assert sorted(rows) == sorted(extras)


def test_the_menu_has_every_page_once() -> None:
    def files(node: Any) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        else:
            for item in node.values() if isinstance(node, dict) else node:
                yield from files(item)

    raw = yaml_load((ROOT / "mkdocs.yml").read_text())
    listed = list(files(raw["nav"]))
    assert len(listed) == len(set(listed))
    assert set(listed) == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_nothing_is_fetched_when_the_pages_are_read() -> None:
    raw = yaml_load((ROOT / "mkdocs.yml").read_text())
    assert raw["theme"]["font"] is False
    for key in ("extra_css", "extra_javascript"):
        assert not any("//" in str(place) for place in raw.get(key, []))
