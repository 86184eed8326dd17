"""Bounds of options, stated where the option is declared: ``Annotated[int, Ge(1)] = 4``.

The constraints are ``Ge``, ``Gt``, ``Le``, ``Lt`` and ``MultipleOf`` of ``annotated_types``, which
pydantic reads too. They may stand inside a union with None or with text, and inside a tuple, where
they hold for each item.
"""

from __future__ import annotations

import itertools
import math
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from shoal.core.errors import ConfigError

_HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    "multiple_of": lambda value, unit: value % unit == 0,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
}
_WORDS = {
    "multiple_of": "a multiple of {}",
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
}


def check_bounds(cls: type[Any], options: Mapping[str, Any], where: Callable[[], str]) -> None:
    """Raise unless every number in ``options`` is within the bounds of its annotation.

    Args:
        cls: the class whose fields are the options.
        options: what is given, by name.
        where: the place of the options in the configuration; called only for the message.

    Raises:
        ConfigError: a number is beyond its bounds; the message says which are allowed.
    """
    for name, hint in _bounded(cls).items():
        for place, value, bounds in _numbers(name, options.get(name), hint):
            if not all(_HOLDS[key](value, bound) for key, bound in bounds.items()):
                raise ConfigError(f"{where()}.{place} = {value!r}: expected {in_words(bounds)}")


def bounds_of(metadata: Iterable[Any]) -> dict[str, Any]:
    """The bounds in the metadata of an annotation, by their names: ``ge``, ``multiple_of``."""
    items = tuple(metadata)
    return {key: getattr(item, key) for key in _HOLDS for item in items if hasattr(item, key)}


def in_words(bounds: Mapping[str, Any]) -> str:
    """The numbers that are allowed, such as ``at least 1``, ``1 to 64`` or ``in (0, 1]``."""
    finite = bounds.get("lt") == math.inf
    texts = {
        key: f"{bound:g}" if isinstance(bound, float) else _spelled(bound)
        for key, bound in bounds.items()
        if not (finite and key == "lt")
    }
    words = {key: _WORDS[key].format(text) for key, text in texts.items()}
    lower, upper = texts.keys() & {"ge", "gt"}, texts.keys() & {"le", "lt"}
    if lower and upper:
        low, high = texts[lower.pop()], texts[upper.pop()]
        closed = texts.keys() >= {"ge", "le"}
        brackets = "[" if "ge" in texts else "(", "]" if "le" in texts else ")"
        range_ = f"{low} to {high}" if closed else f"in {brackets[0]}{low}, {high}{brackets[1]}"
        words = {key: word for key, word in words.items() if key == "multiple_of"}
        words["range"] = range_
    return ", ".join([*words.values(), *(["finite"] if finite else [])])


def _spelled(bound: int) -> str:
    return f"{bound:,}" if bound >= 10**6 else str(bound)


def allowed(cls: type[Any]) -> dict[str, str]:
    """Option -> the numbers that are allowed, in words; without those that have no bounds."""
    return {
        name: " or ".join(dict.fromkeys(map(in_words, _every(hint))))
        for name, hint in _bounded(cls).items()
    }


def _every(hint: Any) -> Iterator[dict[str, Any]]:
    inner = get_args(hint)
    if get_origin(hint) is Annotated:
        yield from filter(None, [bounds_of(inner[1:])])
    for member in inner:
        yield from _every(member)


_BOUNDED: dict[type[Any], dict[str, Any]] = {}


def _bounded(cls: type[Any]) -> dict[str, Any]:
    """The annotations that have a bound."""
    if cls not in _BOUNDED:
        hints = get_type_hints(cls, include_extras=True)
        _BOUNDED[cls] = {name: hint for name, hint in hints.items() if _has_bounds(hint)}
    return _BOUNDED[cls]


def _has_bounds(hint: Any) -> bool:
    inner = get_args(hint)
    own = get_origin(hint) is Annotated and bounds_of(inner[1:])
    return bool(own) or any(_has_bounds(item) for item in inner)


def _numbers(place: str, value: Any, hint: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(place, number, bounds) of each bounded number in an option."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if isinstance(value, Real):
            yield place, value, bounds_of(inner[1:])
        yield from _numbers(place, value, inner[0])
    elif origin in (Union, types.UnionType):
        for member in inner:
            yield from _numbers(place, value, member)
    elif origin is tuple and isinstance(value, tuple | list):
        members = itertools.repeat(inner[0]) if inner[-1] is ... else inner
        for index, (item, member) in enumerate(zip(value, members, strict=False)):
            yield from _numbers(f"{place}.{index}", item, member)
