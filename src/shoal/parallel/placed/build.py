"""The user's file that builds a module: executed, traced."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ConfigError, require

if TYPE_CHECKING:
    from shoal.parallel.placed.trace import TracedGraph


def load(path: Path) -> TracedGraph:
    """Execute a file and trace what its ``build()`` returns.

    Args:
        path: defines ``build()`` that returns a module, and its inputs: shapes or tensors.

    Raises:
        ConfigError: no such file, it fails, or ``build`` returns something else.
        PlanError: the module cannot be traced.
    """
    import torch
    from torch import nn

    from shoal.parallel.placed.trace import trace

    require(path.is_file(), "file", str(path), expected="a Python file that exists")
    module = _execute(path)
    build = getattr(module, "build", None)
    require(
        callable(build),
        f"{path}: build",
        build,
        expected="a function that returns a module and the shapes of its inputs",
    )
    try:
        with torch.device("meta"):
            built: Any = build()  # type: ignore[misc]
    except Exception as cause:
        raise ConfigError(f"{path}: build() fails: {_said(cause)}") from cause
    good = isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module)
    require(
        good and isinstance(built[1], list | tuple),
        f"{path}: build()",
        built,
        expected="(module, [shape of each input]), such as (Mlp(), [(8, 128, 512)])",
    )
    result, inputs = built
    examples = [_example(path, item) for item in inputs]
    return trace(result, examples)


def _example(path: Path, item: Any) -> Any:
    import torch

    if isinstance(item, torch.Tensor):
        return item
    require(
        isinstance(item, Sequence) and all(isinstance(n, int) and n > 0 for n in item),
        f"{path}: build(): input",
        item,
        expected="a shape, such as (8, 128, 512), or a tensor",
    )
    return torch.empty(tuple(item), device="meta")


def _execute(path: Path) -> Any:
    path = path.resolve()
    spec = importlib.util.spec_from_file_location("placed_program", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: not a Python file; give one whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    # Classes of the file are looked up by their module's name.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as cause:
        raise ConfigError(f"{path} fails: {_said(cause)}") from cause
    finally:
        sys.path.remove(str(path.parent))
    return module


def _said(cause: Exception) -> str:
    lines = str(cause).splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0]}"
