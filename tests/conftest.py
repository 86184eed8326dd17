"""The command line is put together once a process, not once a call: no call changes it."""

from __future__ import annotations

import functools
from typing import Any

import typer.main
import typer.testing

COMMAND: Any = functools.cache(typer.main.get_command)
setattr(typer.main, "get_command", COMMAND)  # noqa: B010 - a function of a module
setattr(typer.testing, "_get_command", COMMAND)  # noqa: B010
