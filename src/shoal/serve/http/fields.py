"""The fields of a request's body, each read with its type and range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from shoal.serve.http.errors import ApiError


def wrong(param: str, given: object, expected: str, *, code: str = "invalid_value") -> NoReturn:
    """Refuse a field, by name, with what was given and what is right."""
    shown = repr(given)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise ApiError(f"{param} = {shown}: expected {expected}", param=param, code=code)


class Fields:
    """The fields of a body, each read with its type and range."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def get(self, name: str) -> Any:
        """The value as it came; None if it is not there."""
        return self._body.get(name)

    def integer(self, name: str, low: int, high: int, default: int | None) -> int | None:
        """An integer in a range, both ends included."""
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            wrong(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """A number in a range, both ends included."""
        value = self._body.get(name)
        if value is None:
            return default
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high:  # also refuses what is no number at all
            wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; false if it is not there."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, bool):
            wrong(name, value, "true or false")
        return bool(value)

    def refuse(self, unsupported: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse fields that would change the answer, unless they have a harmless value."""
        for name, unused in unsupported.items():
            value = self._body.get(name)
            if not any(value == harmless for harmless in unused):
                raise ApiError(
                    f"{name} is not supported by this server; leave it out",
                    param=name,
                    code="unsupported_parameter",
                )
