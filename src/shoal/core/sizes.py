"""Sizes in bytes: as people write them, and as they read them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from shoal.core.errors import ConfigError
from shoal.core.tables import digits

_WRITTEN = re.compile(r"^\s*(\d+(?:\.\d*)?)\s*([kKMGT]?)(i?)B?\s*$")
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def bytes_of(size: Any) -> Any:
    """Bytes of ``64MiB``, ``2GB`` or a number; a unit with an i counts in 1024s.

    Raises:
        ConfigError: text that is no size.
    """
    if not isinstance(size, str):
        return size
    match = _WRITTEN.match(size)
    if match is None:
        raise ConfigError(f"{size!r} is no size; write bytes, such as 64MiB, 2GB or 1048576")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit])


Size = Annotated[int, BeforeValidator(bytes_of)]
"""An option in bytes that may be written as ``64MiB``."""


def human_bytes(number: float) -> str:
    """``1.50 GB`` and the like: decimal units, three significant digits."""
    power = 0
    while abs(number) >= 999.5 and power < len(_UNITS) - 1:
        number, power = number / 1000, power + 1
    return f"{digits(number) if power else round(number)} {_UNITS[power]}"
