"""Commands in the documentation parse, jobs in it are jobs, and what is marked runnable runs."""

from __future__ import annotations

import functools
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from docs_pages import PAGES, Block, blocks

from own_home import own_home
from shoal.app.cli import app
from shoal.core.config import parse
from shoal.ir import Machine, kind_named

ALL = [block for page in PAGES for block in blocks(page)]
COMMANDS = sorted(
    {
        line.strip()
        for block in ALL
        if block.language == "shell"
        for line in block.text.splitlines()
        if line.strip().startswith("shoal ")
    }
)
JOBS = [b for b in ALL if b.title in ('title="job.yaml"', 'title="drafter.yaml"')]
MACHINES = [block for block in ALL if block.title == 'title="cluster.yaml"']
RUNNABLE = [block for block in ALL if block.language == "python" and block.runnable]


def test_the_documentation_has_such_blocks() -> None:
    assert len(COMMANDS) > 40
    assert JOBS and MACHINES and len(RUNNABLE) > 3


@functools.cache
def _command() -> Any:
    """All commands, made once: parsing changes nothing in them."""
    return typer.main.get_command(app)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    if words[-1] == "&":  # goes on in the background
        words = words[:-1]
    command: Any = _command()
    while words and words[0].startswith("-"):
        assert any(words[0] in option.opts for option in command.params), words[0]
        words = words[1:]
    while hasattr(command, "commands"):
        assert words, f"{line}: a verb is missing"
        if " ".join(words[:2]) in command.commands:  # such as `train diagnose`
            words = [" ".join(words[:2]), *words[2:]]
        context = typer.Context(command, info_name="shoal")
        command, words = command.get_command(context, words[0]), words[1:]
        assert command is not None, f"{line}: no command {words[0]}"
    # Parses and converts the arguments; nothing is run.
    command.make_context("shoal", list(words))


@pytest.mark.parametrize("block", JOBS, ids=str)
def test_jobs_are_jobs(block: Block) -> None:
    raw = yaml.safe_load(block.text)
    parse(kind_named(raw.get("job", "train")).job_type, raw, where=str(block))


@pytest.mark.parametrize("block", MACHINES, ids=str)
def test_machines_are_machines(block: Block) -> None:
    parse(Machine, yaml.safe_load(block.text), where=str(block))


@pytest.mark.parametrize("block", RUNNABLE, ids=str)
def test_runnable_blocks_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "block.py"
    path.write_text(block.text)
    name = f"docs_block_{RUNNABLE.index(block)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "python"], ids=str)
def test_python_blocks_are_python(block: Block) -> None:
    compile(block.text, str(block), "exec")
