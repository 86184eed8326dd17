"""Options of a planner among the settings of a job: ``planner.memory_gib=40``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.core.errors import require
from shoal.core.files import parse_yaml

_PREFIX = "planner."


def split_options(sets: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(options of the planner, settings of the job) of ``path=value`` texts.

    Raises:
        ConfigError: an option without a value.
    """
    options: dict[str, Any] = {}
    rest = []
    for text in sets:
        path, equals, value = text.partition("=")
        name = path.strip()
        if not name.startswith(_PREFIX):
            rest.append(text)
            continue
        require(bool(equals), f"--set {name}", text, expected=f"{name}=VALUE")
        options[name.removeprefix(_PREFIX)] = parse_yaml(value, f"--set {name}")
    return options, rest
