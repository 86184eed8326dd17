"""An engine's process that is started before it is known what it is to load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.core.errors import ShoalError
from shoal.ir import ServeJob
from shoal.serve.engine.frames import Decoder
from shoal.serve.engine.launch import begin, launch

pytestmark = pytest.mark.multi

FAKE = str(Path(__file__).parent / "http")


@pytest.fixture
def job(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", FAKE, prepend=":")
    return ServeJob(model=str(tmp_path))


def _message(process) -> dict:
    process.socket.settimeout(60)
    decoder = Decoder()
    while True:
        for message in decoder.feed(process.socket.recv(2**16)):
            return message


def test_it_loads_what_it_is_told_later(job):
    begun = begin()
    try:
        assert launch(job, "fake_engine:build", begun) is begun
        assert _message(begun)["kind"] == "ready"
    finally:
        begun.discard()


def test_one_that_has_ended_is_replaced(job):
    begun = begin()
    begun.discard()
    launched = launch(job, "fake_engine:build", begun)
    try:
        assert launched.process.pid != begun.process.pid
        assert _message(launched)["kind"] == "ready"
    finally:
        launched.discard()


def test_what_starts_it_imports_no_values_and_no_torch():
    code = (
        "import sys, shoal.serve.engine.launch; "
        "heavy = {'torch', 'numpy', 'shoal.ir', 'fastapi'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_command_that_fails_leaves_no_process(tmp_path):
    """A directory without a model: the process was begun, and is gone with the command."""
    import psutil
    from typer.testing import CliRunner

    from shoal.app.cli import app

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    done = CliRunner().invoke(app, ["serve", str(tmp_path)])
    assert isinstance(done.exception, ShoalError)
    assert "config.json" in str(done.exception)
    after = {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
    }
    assert after <= before
