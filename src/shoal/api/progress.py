"""A progress bar on a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from shoal.core.theme import console

if TYPE_CHECKING:
    from rich.progress import Progress


class AnswerBar:
    """Ended answers and tokens per second on a terminal; nothing in a pipe."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total, self._shown = total, shown and sys.stderr.isatty()
        self._bar: Progress | None = None

    def __enter__(self) -> AnswerBar:
        self._began, self._tokens, self._ended = time.monotonic(), 0, 0
        if self._shown:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn("prompts"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:,.0f} tok/s"),
                TimeRemainingColumn(),
                console=console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, rate=0.0)
        return self

    def add(self, tokens: int, *, ended: bool) -> None:
        """So many tokens more."""
        self._tokens += tokens
        self._ended += ended
        if self._bar is not None:
            rate = self._tokens / max(1e-9, time.monotonic() - self._began)
            self._bar.update(self._task, completed=self._ended, rate=rate)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
