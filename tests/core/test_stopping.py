"""The signal behind an error, also where only its text is left."""

from __future__ import annotations

import signal

import pytest
from pydantic_core import SchemaError, SchemaValidator, core_schema

from shoal.core.stopping import Stopped, interruption, status_of


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
