"""Numbers as people write them on a command line: 300M, 20B."""

from __future__ import annotations

from shoal.core.errors import ConfigError

__all__ = ["count"]


def count(text: str, option: str = "--tokens") -> int:
    """The number that an option such as ``--tokens`` says.

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
        found = int(float(number) * factor)
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise ConfigError(f"{option} = {text!r}: expected a number such as 300M or 20B")
    return found
