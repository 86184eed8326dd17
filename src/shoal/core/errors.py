"""The one tree of errors that users may see.

::

    ShoalError
    ├── ConfigError            a value in a job, plan, machine or flag
    │   ├── UnknownKeyError    an unknown key
    │   ├── UnknownPartError   an unknown name of a part
    │   └── NonFiniteError     a loss, gradient, weight or moment that is NaN or infinite
    ├── DataError              a corpus or data file
    ├── ModelError             a model directory or configuration
    ├── CheckpointError        a checkpoint that cannot be used
    │   └── CorruptError       data that has changed since it was written
    ├── MachineError           an invalid machine, or one that cannot be measured
    │   └── NoisyMachineError  a measurement that is not reliable
    ├── TierFullError          a memory tier that is full
    │   └── DeviceMemoryError  an operator that does not fit in its device's memory
    ├── KernelError            a kernel or number format that does not support the operation
    ├── PlanError              no valid plan, or a plan that cannot run here
    ├── RankError              a rank that died or hangs
    ├── ServeError             an invalid request, or a server that cannot start
    ├── BuildError             native code that does not compile
    ├── StoreError             a score or results file that cannot be used
    └── MissingExtraError      an optional package that is not installed

Every message says where, what was given, what is allowed and what to do. The
command line prints it as one line and exits with status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BuildError",
    "CheckpointError",
    "ConfigError",
    "CorruptError",
    "DataError",
    "DeviceMemoryError",
    "KernelError",
    "MachineError",
    "MissingExtraError",
    "ModelError",
    "NoisyMachineError",
    "NonFiniteError",
    "PlanError",
    "RankError",
    "ServeError",
    "ShoalError",
    "StoreError",
    "TierFullError",
    "UnknownKeyError",
    "UnknownPartError",
    "install",
    "nearest",
    "rebuild",
    "require",
    "suggestion",
]


class ShoalError(Exception):
    """Base of everything that Shoal raises on purpose."""


class ConfigError(ShoalError):
    """A configuration value that cannot be used."""


class UnknownKeyError(ConfigError):
    """A key that the configuration does not have."""


class UnknownPartError(ConfigError):
    """An unknown name of a part."""


class NonFiniteError(ConfigError):
    """A loss, a gradient, a weight or optimizer state is NaN or infinite."""


class DataError(ShoalError):
    """A corpus or data file that cannot be used."""


class ModelError(ShoalError):
    """A model directory or configuration that cannot be used."""


class CheckpointError(ShoalError):
    """A checkpoint that cannot be used."""


class CorruptError(CheckpointError):
    """Stored data has changed since it was written."""


class MachineError(ShoalError):
    """An invalid machine description, or a failed probe."""


class NoisyMachineError(MachineError):
    """The machine is too busy for a reliable measurement."""


class TierFullError(ShoalError):
    """A memory tier is full."""


class DeviceMemoryError(TierFullError):
    """An operator does not fit in its device's memory, or uses a tensor that is not there."""


class PlanError(ShoalError):
    """No valid plan exists, or this plan cannot run here."""


class KernelError(ShoalError):
    """A kernel or number format does not support the operation."""


class RankError(ShoalError):
    """A rank died or hangs."""


class ServeError(ShoalError):
    """A request that cannot be served, or a server that cannot start."""


class BuildError(ShoalError):
    """Native code failed to compile."""


class StoreError(ShoalError):
    """A score or results file that cannot be used."""


class MissingExtraError(ShoalError):
    """An optional package is needed for this.

    Args:
        package: what could not be imported.
        extra: the extra of ``shoal-ml`` that brings it.
        purpose: what it is needed for.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}; install it with {install(extra)}"
        )


def install(extra: str) -> str:
    """The command that installs an extra of ``shoal-ml``, quoted for a shell."""
    return f"pip install 'shoal-ml[{extra}]'"


def nearest(word: str, choices: Iterable[str], *, most: int = 1) -> str:
    """A hint such as ``did you mean 'tp'?``; empty when nothing is close.

    Args:
        word: as it was written.
        choices: words that are right.
        most: how many of them to name.
    """
    # One wrong letter is half of a name such as ``dp``.
    cutoff = 0.5 if len(word) <= 3 or most > 1 else 0.6
    matches = difflib.get_close_matches(word, list(choices), n=most, cutoff=cutoff)
    *others, last = (repr(match) for match in matches or ("",))
    named = f"{', '.join(others)} or {last}" if others else last
    return f"did you mean {named}?" if matches else ""


def suggestion(word: str, choices: Iterable[str]) -> str:
    """The hint of :func:`nearest` as the end of a sentence; empty when nothing is close."""
    hint = nearest(word, choices)
    return f"; {hint}" if hint else ""


def rebuild(cls: type[ShoalError], message: str) -> ShoalError:
    """An error of another process, whatever the constructor of its class takes."""
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    return error


def require(
    condition: bool,
    where: str,
    given: object,
    *,
    expected: str,
    hint: str = "",
    error: type[ShoalError] = ConfigError,
) -> None:
    """Raise ``error`` with a complete message unless ``condition`` holds.

    Args:
        condition: what must be true.
        where: dotted place of the value, such as ``parallel.tp``.
        given: the value that was given.
        expected: the values that are allowed.
        hint: what to do instead, if that is not obvious.
        error: class of the error to raise.

    Raises:
        ShoalError: of the class ``error``, when the condition is false.
    """
    if not condition:
        tail = f"; {hint}" if hint else ""
        raise error(f"{where} = {given!r}: expected {expected}{tail}")
