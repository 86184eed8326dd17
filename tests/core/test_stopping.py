"""The signal behind an error, also where only its text is left."""

from __future__ import annotations

import importlib
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic_core import SchemaError, SchemaValidator, core_schema

from shoal.core.stopping import Stopped, catch_signals, interruption, status_of


class Interrupting:
    """A value whose ``repr`` a signal interrupts: pydantic-core asks for it in a ``Literal``."""

    def __init__(self, raised: KeyboardInterrupt) -> None:
        self.raised = raised

    def __repr__(self) -> str:
        raise self.raised


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (KeyboardInterrupt(), 130),
        (Stopped(signal.SIGTERM), 143),
        (Stopped(signal.SIGHUP), 129),
    ],
)
def test_a_class_that_was_being_built(raised: KeyboardInterrupt, status: int) -> None:
    with pytest.raises(SchemaError) as error:
        SchemaValidator(core_schema.literal_schema([Interrupting(raised)]))
    # This is why the text is read: the signal is neither the cause nor the context.
    assert error.value.__cause__ is None
    assert error.value.__context__ is None
    stop = interruption(error.value)
    assert stop is not None
    assert status_of(stop) == status


def test_the_cause_and_the_context() -> None:
    stop = Stopped(signal.SIGTERM)
    outer = RuntimeError("an import failed")
    outer.__context__ = ImportError("partly initialized")
    outer.__context__.__cause__ = stop
    assert interruption(outer) is stop


def test_other_errors_are_no_signal() -> None:
    assert interruption(ValueError("the run stopped: SIGNAL lost")) is None
    assert interruption(RuntimeError("KeyboardInterrupt is a class")) is None


@pytest.fixture
def caught() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    kept = {one: signal.signal(one, signal.default_int_handler) for one in numbers}
    catch_signals()
    yield
    for one, handler in kept.items():
        signal.signal(one, handler)


MODULE = """
import os, signal
kept = []
try:
    for number in {numbers}:
        signal.raise_signal(number)
except KeyboardInterrupt:
    kept.append("raised")
"""


@pytest.mark.usefixtures("caught")
@pytest.mark.timeout(0)  # it would use the same timer
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_is_not_interrupted_by_one_signal(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an import drops is lost: the run that begins after it would never hear of it."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"module_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(numbers=[int(number)]))
    with pytest.raises(KeyboardInterrupt) as stop:
        importlib.import_module(name)
        time.sleep(60)
    assert sys.modules[name].kept == []
    assert status_of(stop.value) == 128 + number


@pytest.mark.usefixtures("caught")
@pytest.mark.timeout(0)  # it would use the same timer
def test_a_second_signal_interrupts_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"module_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(numbers=[int(signal.SIGINT)] * 2))
    assert importlib.import_module(name).kept == ["raised"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
