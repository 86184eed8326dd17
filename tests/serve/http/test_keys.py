"""Keys come from files and the environment; no command line has one, for all users can read it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import typer
from listening import listening

pytestmark = pytest.mark.multi

KEY = "key-that-nobody-may-read-0123456789"
SECRET = ("key", "token", "secret", "password", "credential")


def command_lines(process):
    """Of a process and all below it, as every user of the machine can read them."""
    command_lines = []
    for one in (process, *process.children(recursive=True)):
        command_lines.append(Path(f"/proc/{one.pid}/cmdline").read_bytes())
    return command_lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["server", "router", "dashboard"])
def test_no_process_shows_the_key(kind, byte_model, tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_API_KEY", KEY)
    with listening(kind, byte_model, tmp_path) as it:
        lines = command_lines(psutil.Process(it.process.pid))
        assert len(lines) >= {"server": 2, "router": 3, "dashboard": 1}[kind]
        assert all(lines) and not any(KEY.encode() in line for line in lines)


def test_a_key_on_a_command_line_would_be_noticed():
    """The reader of the test above reads what ``ps`` shows."""
    with subprocess.Popen([sys.executable, "-c", "input()", KEY], stdin=subprocess.PIPE) as process:
        shown = command_lines(psutil.Process(process.pid))
        process.stdin.close()
    assert KEY.encode() in shown[0]


def option_type(option):
    """What typer makes of the word on the command line."""
    return option.type_descriptor.annotation


def test_no_option_of_the_command_takes_a_secret():
    from shoal.app.cli import app

    odd, texts = [], []

    def walk(command, path):
        for option in command.params:
            words = {word for name in option.opts for word in name.strip("-").split("-")}
            text = option_type(option) is str
            texts.append(text)
            if text and words.intersection(SECRET):
                odd.append((*path, option.name))
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, (*path, name))

    walk(typer.main.get_command(app), ())
    assert odd == [] and any(texts)
