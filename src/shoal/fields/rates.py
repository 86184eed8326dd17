"""Rates of a machine that are timed once and kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.core.config import Value, parse
from shoal.core.errors import ConfigError
from shoal.core.files import shoal_home, write_json
from shoal.core.native import cpu_model
from shoal.ir import Machine

_Rates = TypeVar("_Rates", bound=Value)
_Result = TypeVar("_Result")


def kept_rates(file: str, key: str, cls: type[_Rates], timed: Callable[[], _Rates]) -> _Rates:
    """What was timed before, or is timed now and kept.

    Args:
        file: name of a file in Shoal's home.
        key: what the rates depend on, such as the processor.
        cls: what they are.
        timed: measures them.

    Raises:
        ConfigError: the file is damaged.
    """
    path = shoal_home() / file
    known: dict[str, Any] = {}
    if path.exists():
        try:
            known = json.loads(path.read_bytes())
            if key in known:
                return parse(cls, known[key], where=str(path))
        except (OSError, ValueError, TypeError, ConfigError) as cause:
            raise ConfigError(
                f"{path}: cannot be read ({cause}); remove it, and it is measured again"
            ) from cause
    result = timed()
    write_json(path, {**known, key: result.model_dump()})
    return result


def core_share(machine: Machine, known: float) -> float:
    """How fast a core of a described machine is, over one whose rates are known.

    Args:
        machine: the host of a GPU is not described, and has cores of a server.
        known: FLOP/s in fp32 of the core whose rates are known.
    """
    cores = machine.device.num_cores or 1
    flops = machine.device.peak_flops.get("fp32", known * cores) / cores
    return 1.0 if machine.device.kind == "gpu" else min(max(flops / known, 0.1), 2.0)


def machine_rates(
    machine: Machine, file: str, described: _Rates, timed: Callable[[], _Rates], flops: float
) -> _Rates:
    """How fast a core of a machine is: timed and kept if it is this one, else by its description.

    Args:
        machine: which.
        file: name of a file in Shoal's home.
        described: of a core whose rates are known; those whose names end with ``_s`` are scaled.
        timed: measures this machine's.
        flops: FLOP/s in fp32 of the core that is known.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    if machine.fingerprint.get("cpu") == cpu_model():
        return kept_rates(file, cpu_model(), type(described), timed)
    share = core_share(machine, flops)
    scaled = {name: value / share for name, value in described if name.endswith("_s")}
    return described.model_copy(update=scaled)


def timed_call(run: Callable[[], _Result]) -> tuple[float, _Result]:
    """Seconds of a call, and what it gave."""
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def least_seconds(run: Callable[[], _Result], times: int = 3) -> tuple[float, _Result]:
    """Seconds of the quickest of a few runs, and what the last of them gave."""
    least, result = timed_call(run)
    for _ in range(times - 1):
        seconds, result = timed_call(run)
        least = min(least, seconds)
    return least, result
