"""What all tests share: ``tests/oracles``, and one command line a process.

The command line is put together once a process, not once a call: no call changes it.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import typer.main
import typer.testing

COMMAND: Any = functools.cache(typer.main.get_command)
setattr(typer.main, "get_command", COMMAND)  # noqa: B010 - a function of a module
setattr(typer.testing, "_get_command", COMMAND)  # noqa: B010

sys.path.insert(0, str(Path(__file__).with_name("oracles")))
