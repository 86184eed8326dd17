"""The signals that end a command: Ctrl-C, a request to end, and a closed terminal.

All three are a :class:`KeyboardInterrupt` for the code that runs, so whatever cleans up for Ctrl-C
does so for SIGTERM and SIGHUP. The command then exits with 128 plus the number of the signal:
130, 143 and 129.
"""

from __future__ import annotations

import re
import signal
from types import FrameType

__all__ = ["Stopped", "catch_signals", "interruption", "status_of"]


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP asked this process to end.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def catch_signals() -> None:
    """Raise :class:`Stopped` at SIGTERM and SIGHUP, and KeyboardInterrupt at SIGINT.

    A signal that is ignored, as ``nohup`` ignores SIGHUP, stays ignored. For the main thread.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_AS_TEXT = re.compile(r"\b(KeyboardInterrupt|Stopped): (?P<name>SIG\w+)?")


def _stop(number: int, _frame: FrameType | None) -> None:
    raise Stopped(number)


def interruption(error: BaseException) -> KeyboardInterrupt | None:
    """The signal behind an error: what is interrupted, an import say, may raise one of its own.

    Usually the signal is a cause or the context of that error. An extension module that a signal
    interrupts while it builds a class may keep the text alone (pydantic's ``SchemaError``).
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, KeyboardInterrupt):
            return at
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    kept = _AS_TEXT.search(str(error))
    if kept is None:
        return None
    return Stopped(signal.Signals[kept["name"]]) if kept["name"] else KeyboardInterrupt()


def status_of(stop: KeyboardInterrupt) -> int:
    """Exit status of a command that ``stop`` has ended."""
    return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)
