"""The signals that end a command: Ctrl-C, a request to end, and a closed terminal.

All three are a :class:`KeyboardInterrupt` for the code that runs, so whatever cleans up for Ctrl-C
does so for SIGTERM and SIGHUP. The command then exits with 128 plus the number of the signal:
130, 143 and 129.

An import is not interrupted: what is raised in there is dropped by modules written in C and by the
callbacks of the import system. The signal waits for its end, a second one does not.
"""

from __future__ import annotations

import re
import signal
from types import FrameType


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

    While a module is being imported that waits; it uses SIGALRM. A signal that is ignored, as
    ``nohup`` ignores SIGHUP, stays ignored. For the main thread.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


_AS_TEXT = re.compile(r"\b(KeyboardInterrupt|Stopped): (?P<name>SIG\w+)?")
_AGAIN_S = 0.01


def _stop(number: int, frame: FrameType | None) -> None:
    waits, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    if _imports(frame) and not waits:
        signal.signal(signal.SIGALRM, lambda _, at: _stop(number, at))
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        return
    raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


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
