"""The user's file: loaded as the program it is, and called with what it takes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from shoal.claims.check.protocols import Axes, CheckSettings, LossOverRanks
from shoal.core.errors import ConfigError, require

_NEEDED = ("model", "batch")
_FUNCTIONS = (
    *_NEEDED,
    "loss",
    "optimizer",
    "parallelize",
    "local_batch",
    "train_step",
    "parallel_step",
    "whole",
    "rename",
)


class CheckedProgram:
    """The functions of a file under check.

    Raises:
        ConfigError: it lacks one that is needed.
    """

    def __init__(self, module: ModuleType, where: str) -> None:
        self._module = module
        self.where = where
        for name in _FUNCTIONS:
            value = getattr(module, name, None)
            require(
                value is None or callable(value),
                f"{where}: {name}",
                value,
                expected="a function",
            )
        for name in _NEEDED:
            if not self.has(name):
                raise ConfigError(
                    f"{where}: defines no {name}(); a file under check has at least model(), "
                    f"batch(step) and loss(model, batch)"
                )
        if not self.has("loss") and not self.has("train_step"):
            raise ConfigError(
                f"{where}: defines neither loss(model, batch) nor "
                f"train_step(model, optimizer, batch); define one of them"
            )

    @classmethod
    def load(cls, settings: CheckSettings) -> CheckedProgram:
        """Run the file, as ``python FILE`` would but for its ``__main__`` part.

        Raises:
            ConfigError: no such file, or it lacks a function.
        """
        path = settings.path
        if path is None:
            sys.path.insert(0, str(Path.cwd()))
            return cls(importlib.import_module(settings.file), settings.file)
        path = path.resolve()
        sys.path.insert(0, str(path.parent))
        sys.argv = [str(path)]
        spec = importlib.util.spec_from_file_location("checked_program", path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{path}: not a Python file; give one whose name ends in .py")
        module = importlib.util.module_from_spec(spec)
        # Classes of the file are looked up by their module's name.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return cls(module, settings.file)

    def has(self, name: str) -> bool:
        """Whether the file defines this function."""
        return getattr(self._module, name, None) is not None

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function with as many of these arguments as it takes."""
        function: Callable[..., Any] = getattr(self._module, name)
        return function(*arguments[: _takes(function, len(arguments))])

    @property
    def mesh(self) -> Axes | None:
        """The mesh that the file asks for.

        Raises:
            ConfigError: not a dictionary of sizes.
        """
        value = getattr(self._module, "mesh", None)
        if value is None:
            return None
        good = isinstance(value, dict) and all(
            isinstance(name, str) and isinstance(size, int) and size > 0
            for name, size in value.items()
        )
        require(
            good,
            f"{self.where}: mesh",
            value,
            expected='axes and sizes, such as {"dp": 2, "tp": 2}',
        )
        return dict(value)

    @property
    def loss_over_ranks(self) -> LossOverRanks:
        """How the ranks' losses make the whole one.

        Raises:
            ConfigError: neither mean, sum nor same.
        """
        value = getattr(self._module, "loss_over_ranks", "mean")
        require(
            value in ("mean", "sum", "same"),
            f"{self.where}: loss_over_ranks",
            value,
            expected="'mean', 'sum' or 'same'",
        )
        return cast(LossOverRanks, value)


def _takes(function: Callable[..., Any], most: int) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C: it has no signature
        return most
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return most
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(most, sum(p.kind in places for p in parameters))


def blame(error: BaseException, settings: CheckSettings, doing: str) -> str:
    """One line about an error of the user's program: file, line, what it was."""
    text = f"{type(error).__name__}: {error}".strip().rstrip(":")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    here = Path(__file__).parent
    path = settings.path
    if path is None:
        loaded = getattr(sys.modules.get(settings.file), "__file__", None)
        path = Path(loaded) if loaded else None
    home = None if path is None else path.resolve()
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        source = Path(frame.filename)
        outside = home is None and here not in source.parents and not place
        if source == home or (outside and "importlib" not in frame.filename):
            place = f"{frame.filename}, line {frame.lineno}, in {frame.name}: "
    return f"{place or f'{settings.file}: '}{text} (while {doing})"
