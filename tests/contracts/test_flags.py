"""Flags mean the same on every verb, and are where they mean something; every help can be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.ir import kinds

# What was asked here is explained now: a group without commands.
_MOVED = ("study",)

SHORT = {
    "-m": "--machine",
    "-o": "--output",
    "-q": "--quiet",
    "-v": "--verbose",
    "-h": "--help",
}
"""Short flag -> the long one that it is on every verb that has it."""

# Kinds of job, whose verbs have the flags of their job.
_PLANNED = tuple(f"plan {kind}" for kind in kinds())
_RUN = tuple(f"run {kind}" for kind in kinds())
_OF_DATA = tuple(kind for kind, one in kinds().items() if one.subject == "data")
_TRAINING = ("plan train", "plan drafter", "run train", "run drafter", "train")

WHERE: dict[str, tuple[str, ...]] = {
    "--machine": (*_PLANNED, *_RUN, "train", "bench serve", "probe", "score"),
    "--model": (
        *(f"{verb} {kind}" for verb in ("plan", "run") for kind in ("train", "serve", "drafter")),
        *("train", "serve", "claims run"),
        *("bench serve", "bench decode", "bench activations", "bench tune"),
    ),
    "--name": (*_PLANNED, *_RUN, "train", "serve", "bench serve"),
    "--lr": (*_TRAINING, "model routers"),
    "--seq-len": _TRAINING,
    "--data": (
        *(*_TRAINING, "claims run"),
        *(f"{verb} {kind}" for verb in ("plan", "run") for kind in _OF_DATA),
    ),
    "--set": (
        *(*_PLANNED, *_RUN, "train", "serve", "bench serve", "bench tune", "demo"),
        *("model convert", "claims run"),
    ),
    "--quiet": (
        *(*_PLANNED, *_RUN, "train", "serve", "probe", "check", "demo", "claims run"),
        *("bench serve", "bench attention", "bench kernels", "bench tune", "bench decode"),
        *("bench activations", "bench predictions"),
        *("model quantize", "model kv", "model routers"),
    ),
    "--verbose": (*_PLANNED, "claims list"),
}
"""Flag -> the verbs that have it, besides those of studies; a new verb is added on purpose."""

_WITHOUT_OUTPUT = {
    "demo": "tells a story",
    "dash": "serves pages",
}


def _walk(command: Any, context: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    yield " ".join(path), command
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        if path or name not in _MOVED:
            inner = command.get_command(context, name)
            below = type(context)(inner, info_name=name, parent=context)
            yield from _walk(inner, below, (*path, name))


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    """Words -> command, groups included."""
    root = typer.main.get_command(app)
    context = root.make_context("shoal", [], resilient_parsing=True)
    return {path: command for path, command in _walk(root, context, ()) if path}


def _options(command: Any) -> list[set[str]]:
    return [{*one.opts, *one.secondary_opts} for one in command.params if one.opts[0][0] == "-"]


def test_a_short_flag_is_the_same_everywhere(commands: dict[str, Any]) -> None:
    odd = [
        f"{path}: {sorted(names)}"
        for path, command in commands.items()
        for names in _options(command)
        for short in names
        if len(short) == 2 and SHORT.get(short) not in names
    ]
    missing = [
        f"{path}: {long} without {short}"
        for path, command in commands.items()
        for names in _options(command)
        for short, long in SHORT.items()
        if long in names and short not in names
    ]
    assert len(commands) > 70 and odd == [] and missing == []


def test_flags_are_where_they_mean_something(commands: dict[str, Any]) -> None:
    wrong = []
    for flag, expected in WHERE.items():
        having = {
            path
            for path, command in commands.items()
            if not path.startswith("explain") and any(flag in names for names in _options(command))
        }
        wrong += [f"{path}: no {flag}" for path in {*expected} - having]
        wrong += [f"{path}: {flag} is not in the table" for path in having - {*expected}]
    assert sorted(wrong) == []


def test_every_answer_can_be_json(commands: dict[str, Any]) -> None:
    without = [
        path
        for path, command in commands.items()
        if not getattr(command, "commands", None)
        and path not in ("run", "plan")
        and not any("--output" in names for names in _options(command))
    ]
    assert without == list(_WITHOUT_OUTPUT)


def test_every_help_has_an_example_and_fits(commands: dict[str, Any]) -> None:
    wrong = []
    runner = CliRunner()
    for path in commands:
        done = runner.invoke(app, [*path.split(), "--help"], terminal_width=80)
        lines = done.output.splitlines()
        # Once in the line of usage.
        shown = done.output.replace("-", "_").count(f"shoal {path}".replace("-", "_"))
        if done.exit_code or "Examples" not in done.output or shown < 2:
            wrong.append(f"{path}: no example")
        wrong += [f"{path}: {line}" for line in lines if len(line.rstrip()) > 80]
    assert wrong == []
