"""Numbers as people write them on a command line: 300M, 20B."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from shoal.core.errors import ConfigError


def count(text: str, option: str = "tokens") -> int:
    """The number that an option such as ``tokens`` says.

    Args:
        text: digits, and K, M, B or T behind them for thousands to millions of millions.
        option: which one, for the message.

    Raises:
        ConfigError: it is no such number, or less than 1.
    """
    factors = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    number, factor = text.strip().upper(), 1.0
    if number[-1:] in factors:
        factor = factors[number[-1]]
        number = number[:-1]
    try:
        result = int(float(number) * factor)
    except (ValueError, OverflowError):
        result = 0
    if result < 1:
        raise ConfigError(f"{option} = {text!r}: expected a number such as 300M or 20B")
    return result


def duration(text: str, option: str) -> float:
    """The seconds that an option such as ``--budget 5m`` says.

    Args:
        text: a number, and ms, s, m or h behind it for milliseconds to hours; seconds without.
        option: which one, for the message.

    Raises:
        ConfigError: it is no such time, or not above 0.
    """
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    number = text.strip().lower()
    unit = next((unit for unit in units if number.endswith(unit)), "")
    try:
        result = float(number.removesuffix(unit)) * units.get(unit, 1.0)
    except ValueError:
        result = 0.0
    if not 0 < result < 1e9:
        raise ConfigError(f"{option} = {text!r}: expected a time such as 500ms, 90s or 5m")
    return result


def _counted(given: Any) -> Any:
    try:
        return count(given) if isinstance(given, str) else given
    except ConfigError:
        raise ValueError("expected a number such as 300M or 20B") from None


Count = Annotated[int, BeforeValidator(_counted), Field(ge=1)]
"""An option that may be written as ``300M``."""
