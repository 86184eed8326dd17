"""Log lines of programs: one line each on stderr, equal ones folded."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

# Different lines whose repetition is counted at a time; the one quiet for longest goes first.
_LINES = 256


class FoldRepeats(logging.Filter):
    """Pass the first of equal lines, count the others, and report their number.

    Lines are equal when logger, level, text and kind of exception are. The count is reported in
    a line of its own, with the first line that comes after the window, or at the end.

    Args:
        window_s: s for which a line is not repeated.
        clock: s.
    """

    def __init__(
        self, window_s: float = 30.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._window_s, self._clock = window_s, clock
        # key -> [s of the line that was passed, lines held back since, the last of them]
        self._lines: dict[tuple[object, ...], tuple[float, int, logging.LogRecord]] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write ``record``."""
        if getattr(record, "folded", False):
            return True
        kind = record.exc_info[0] if record.exc_info else None
        key = (record.name, record.levelno, record.getMessage(), kind)
        now = self._clock()
        with self._lock:
            due = self._expired(now)
            known = self._lines.get(key)
            if known is not None:
                self._lines[key] = (known[0], known[1] + 1, record)
            else:
                self._lines[key] = (now, 0, record)
                if len(self._lines) > _LINES:
                    due.append(self._lines.pop(next(iter(self._lines))))
        self._report(due)
        return known is None

    def flush(self) -> None:
        """Report what was held back until now."""
        with self._lock:
            due = list(self._lines.values())
            self._lines.clear()
        self._report(due)

    def _expired(self, now: float) -> list[tuple[float, int, logging.LogRecord]]:
        # In the order in which they were passed, so the first that is not due ends the search.
        due = []
        for key, entry in list(self._lines.items()):
            if now - entry[0] < self._window_s:
                break
            due.append(self._lines.pop(key))
        return due

    def _report(self, due: list[tuple[float, int, logging.LogRecord]]) -> None:
        for _, number, record in due:
            if number:
                text = f"{record.getMessage()} ({number} more like this)"
                again = logging.LogRecord(
                    record.name, record.levelno, record.pathname, record.lineno, text, (), None
                )
                again.folded = True
                logging.getLogger(record.name).handle(again)


def log_to_stderr(
    *, form: str = "%(asctime)s %(levelname)s %(message)s", level: int = logging.WARNING
) -> None:
    """Write log lines of this process to stderr, equal ones folded; once for a process.

    Args:
        form: of a line, as :class:`logging.Formatter` takes it.
        level: least level of a line.
    """
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(form))
    fold = FoldRepeats()
    handler.addFilter(fold)
    root.addHandler(handler)
    root.setLevel(level)
    atexit.register(fold.flush)
