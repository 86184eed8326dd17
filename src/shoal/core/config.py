"""Typed values, and where each of their fields came from.

A configuration is a tree of frozen pydantic models (:class:`Value`). It is filled
in layers, each over the last: the defaults, a YAML file, the environment
(``SHOAL_PARALLEL__DP=2`` is ``parallel.dp``), flags, and ``--set path=value``.
The result remembers for every leaf which layer set it, and prints so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import CoreSchema, core_schema

from shoal.core.errors import ConfigError, MachineError, ShoalError
from shoal.core.files import parse_yaml, read_yaml, to_yaml, write_atomic
from shoal.core.parts import Choice, explain, first_error, keys_at, options_of, table

# Environment variables of the product that are not keys of a configuration.
RESERVED = frozenset(
    {
        "SHOAL_API_KEY",
        "SHOAL_HOME",
        "SHOAL_DATA",
        "SHOAL_DEBUG",
        "SHOAL_OFFLINE",
        "SHOAL_RENDEZVOUS",
    }
)

_V = TypeVar("_V", bound="Value")


class Value(BaseModel):
    """A plain typed value that reads and writes YAML."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def load(cls: type[_V], path: Path) -> _V:
        """Read one value from a YAML file.

        Raises:
            ConfigError: the file cannot be read or does not fit; names the key.
        """
        return parse(cls, read_yaml(path), where=str(path))

    def save(self, path: Path, *, header: str = "") -> None:
        """Write this value as YAML, atomically."""
        write_atomic(path, self.as_yaml(header), error=ConfigError)

    def as_yaml(self, header: str = "") -> str:
        """This value as YAML, below comments."""
        return to_yaml(self.model_dump(mode="json", exclude_none=True), header=header)


@dataclass(frozen=True)
class Kind:
    """Annotation of a :class:`Choice` field: which table its name comes from.

    ``Annotated[Choice, Kind("optimizer")]`` checks name and options on reading, by
    building the part once, and lists the names in the JSON schema.
    """

    kind: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        names = list(table(self.kind))
        options = [
            {
                "type": "object",
                "required": ["name"],
                "additionalProperties": False,
                "properties": {
                    "name": {"const": name},
                    **{key: {} for key in options_of(table(self.kind).load(name))},
                },
            }
            for name in names
        ]
        return {"title": self.kind, "anyOf": [{"enum": names}, *options]}

    def _check(self, choice: Choice) -> Choice:
        table(self.kind).build(choice)
        return choice


def parse(cls: type[_V], raw: Any, *, where: str) -> _V:
    """Validate plain data as ``cls``.

    Raises:
        ConfigError: the data does not fit; the message names place and spelling.
    """
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: expected a mapping of keys, found {type(raw).__name__}")
    try:
        return cls.model_validate(raw)
    except ValidationError as cause:
        location = first_error(cause)["loc"][:-1]
        complaint: ShoalError = explain(cause, "", known=keys_at(cls, location))
    except (ConfigError, MachineError) as cause:  # from a validator of the value itself
        complaint = cause
    raise type(complaint)(f"{where}: {complaint}" if where else str(complaint))


@dataclass
class ResolvedValue(Generic[_V]):
    """A value and, for each of its leaves, the reason why it is what it is."""

    value: _V
    origins: dict[str, str] = field(default_factory=dict)

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """(path, value, reason) of every leaf, in the order of the fields."""
        for path, leaf in _leaves(self.value.model_dump(mode="json")):
            reason = next(
                (self.origins[p] for p in _prefixes(path) if p in self.origins), "default"
            )
            yield path, "none" if leaf is None else str(leaf), reason

    def completed(self, usual: Mapping[str, Any], reason: str) -> ResolvedValue[_V]:
        """See :func:`completed`; what was open was set for ``reason``."""
        new = open_paths(self.value, usual)
        value = completed(self.value, usual)
        return ResolvedValue(value, {**self.origins, **dict.fromkeys(new, reason)})

    def replace(self, changes: Mapping[str, Any], reason: str) -> ResolvedValue[_V]:
        """A copy in which some leaves, by dotted path, were set for ``reason``."""
        raw = self.value.model_dump(mode="json", exclude_unset=True)
        for path, leaf in changes.items():
            _put(type(self.value), raw, path, leaf, reason)
        value = parse(type(self.value), raw, where=reason)
        return ResolvedValue(value, {**self.origins, **dict.fromkeys(changes, reason)})


def open_paths(value: Value, paths: Iterable[str]) -> list[str]:
    """Those of some dotted paths that nobody has set: a default holds there."""
    return [path for path in paths if not _is_set(value, path)]


def _is_set(value: Any, path: str) -> bool:
    first, _, rest = path.partition(".")
    if isinstance(value, Choice):
        return first in value.options
    if not isinstance(value, BaseModel) or first not in value.model_fields_set:
        return not isinstance(value, BaseModel)
    return not rest or _is_set(getattr(value, first), rest)


def completed(value: _V, usual: Mapping[str, Any]) -> _V:
    """The value with other defaults where nobody has set anything.

    Args:
        value: whose fields remember whether they were set.
        usual: dotted path -> the default that holds here.

    Raises:
        ConfigError: a default does not fit what was set.
    """
    new = open_paths(value, usual)
    if not new:
        return value
    raw = value.model_dump(mode="json", exclude_unset=True)
    for path in new:
        _put(type(value), raw, path, usual[path], "default")
    return parse(type(value), raw, where="default")


def resolve(
    cls: type[_V],
    *,
    base: _V | None = None,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
) -> ResolvedValue[_V]:
    """Fill a configuration from all layers.

    Args:
        cls: the configuration's type.
        base: a value to start from, such as that of a run to go on with; the defaults if none.
        file: a YAML file, or none.
        environment: the variables to read; ``os.environ`` if not given.
        flags: dotted path -> value; entries that are None were not given.
        sets: ``path=value`` words, the value in YAML.

    Raises:
        ConfigError: any layer is wrong; the message names layer, key and fix.
    """
    raw: dict[str, Any] = {}
    origins: dict[str, str] = {}
    complaints: list[ShoalError] = []
    if base is not None:
        # What it leaves to its defaults stays open, for a planner to choose.
        raw = base.model_dump(mode="json", exclude_unset=True)
        origins = {path: "plan" for path, _ in _leaves(raw)}

    def put(path: str, value: Any, reason: str) -> None:
        _put(cls, raw, path, value, reason)
        origins[path] = reason
        check(raw, reason)

    def check(given: Any, where: str) -> None:
        # A wrong value is blamed on the layer that gave it, unless a later one completes it: a
        # part that needs a path is named by one word, and the path given by the next.
        try:
            parse(cls, given, where=where)
        except ShoalError as cause:
            complaints.append(cause)
        else:
            complaints.clear()

    if file is not None:
        given = read_yaml(file)
        check(given, str(file))
        if complaints and not isinstance(given, Mapping):
            raise complaints[0]
        raw = dict(given or {})
        origins.update({path: f"file {file.name}" for path, _ in _leaves(raw)})
    for name, text in sorted((os.environ if environment is None else environment).items()):
        if name.startswith("SHOAL_") and name not in RESERVED:
            path = name.removeprefix("SHOAL_").lower().replace("__", ".")
            put(path, parse_yaml(text, name), f"environment {name}")
    for path, value in (flags or {}).items():
        if value is not None:
            put(path, value, f"flag for {path}")
    for word in sets:
        path, separator, text = word.partition("=")
        if not separator or not path:
            raise ConfigError(f"--set {word}: expected path=value, such as --set parallel.dp=2")
        put(path.strip(), parse_yaml(text, f"--set {path}"), f"--set {path}")
    if complaints:
        raise complaints[0]
    return ResolvedValue(parse(cls, raw, where=str(file or "")), origins)


def _put(cls: type[BaseModel], raw: dict[str, Any], path: str, value: Any, reason: str) -> None:
    *parents, last = path.split(".")
    place = raw
    for depth, parent in enumerate(parents):
        inner = place.get(parent)
        if inner is None and depth == 0 and parent in cls.model_fields and last != "name":
            # An option of a part that was not named is one of the part by default.
            default = cls.model_fields[parent].default
            inner = default.name if isinstance(default, Choice) else None
        if isinstance(inner, str):  # the short spelling of a choice
            inner = {"name": inner}
        if inner is None:
            inner = {}
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{reason}: {parent} is a single value and has no key {last!r}")
        place[parent] = dict(inner)
        place = place[parent]
    place[last] = value


def _leaves(raw: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(raw, Mapping) and raw:
        for key, item in raw.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, raw


def _prefixes(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
