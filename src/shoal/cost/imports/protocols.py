"""What a reader of logs promises."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from shoal.cost.imports.log import Log


@runtime_checkable
class LogReader(Protocol):
    """A part of kind ``log``: one format of log.

    A reader needs neither torch nor the engine, keeps no more than the numbers, and executes
    nothing of what it reads.
    """

    def sniff(self, path: Path) -> int:
        """How many entries at the start of the file are in this format; 0 for none."""

    def read(self, path: Path) -> Log:
        """Every entry of the log.

        Raises:
            DataError: the file is no such log, or an entry is broken; names the line.
        """
