"""Text that stands for a number, a unit or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.fields.data.readers import arrow

NOTHING = ("", "na", "n/a", "nan", "null", "none", "?", "-", "missing", "unknown")
"""Texts that mean that a value is missing, in small letters."""

_NUMBER = r"^(?P<number>[+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>[a-zA-Zµ°%/]*)$"

UNITS: dict[str, tuple[str, float]] = {
    **{u: ("length", f) for u, f in {"mm": 1e-3, "cm": 1e-2, "m": 1.0, "km": 1e3}.items()},
    **{u: ("imperial", f) for u, f in {"in": 0.0254, "ft": 0.3048, "mi": 1609.344}.items()},
    **{u: ("mass", f) for u, f in {"mg": 1e-6, "g": 1e-3, "kg": 1.0, "t": 1e3}.items()},
    **{u: ("time", f) for u, f in {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}.items()},
    **{u: ("bytes", f) for u, f in {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}.items()},
    **{u: ("share", f) for u, f in {"%": 0.01, "": 1.0}.items()},
}
"""Unit -> what it measures, and how many of its base it is."""


def trimmed(texts: Any) -> Any:
    """Without white space around; null where that says that nothing is there."""
    compute, pa = arrow("compute"), arrow()
    bare = compute.utf8_trim_whitespace(texts)
    nothing = compute.is_in(
        compute.utf8_lower(bare), value_set=pa.array(NOTHING, pa.large_string())
    )
    return compute.if_else(nothing, pa.scalar(None, pa.large_string()), bare)


def folded(texts: Any) -> Any:
    """In small letters, with single spaces: spellings of one category become one."""
    compute = arrow("compute")
    lower = compute.utf8_lower(compute.utf8_trim_whitespace(texts))
    return compute.replace_substring_regex(lower, pattern=r"[\s_-]+", replacement=" ")


def parsed(texts: Any) -> tuple[np.ndarray, Any]:
    """Numbers, float64 with NaN for what is none, and the unit behind each, null for no number."""
    compute, pa = arrow("compute"), arrow()
    found = compute.extract_regex(compute.utf8_trim_whitespace(texts), pattern=_NUMBER)
    digits = compute.replace_substring(found.field("number"), pattern=",", replacement="")
    digits = compute.if_else(found.is_valid(), digits, pa.scalar(None, digits.type))
    numbers = digits.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(float)
    return numbers, compute.if_else(found.is_valid(), found.field("unit"), None)


def in_base(numbers: np.ndarray, units: Any, bare: str = "") -> np.ndarray:
    """Numbers in the base of their unit: metres, kilograms, seconds, bytes, shares.

    Args:
        numbers: [n].
        units: text array [n].
        bare: unit of numbers that have none.

    Returns:
        float64 [n]; a number with an unknown unit stays as it is.
    """
    factors = {unit: factor for unit, (_, factor) in UNITS.items()}
    factors[""] = factors.get(bare, 1.0)
    coded = units.dictionary_encode()
    known = np.array([factors.get(unit, 1.0) for unit in coded.dictionary.to_pylist()] + [1.0])
    codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return np.asarray(numbers * known[codes])
