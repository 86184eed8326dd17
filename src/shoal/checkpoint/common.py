"""What readers of checkpoints of every format ask alike: a tensor, a box of it, and the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError, nearest, require


def no_tensor(path: Path | str, name: str, known: Iterable[str]) -> str:
    """What is said of a tensor that is not there."""
    hint = nearest(name, known) or "see shoal model ls"
    return f"{path}: holds no tensor {name!r}; {hint}"


def places(files: Sequence[str]) -> str:
    """The first of several files, and how many more there are."""
    return files[0] + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def box_of(
    path: Path | str,
    name: str,
    whole: tuple[int, ...],
    offset: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
) -> Box:
    """The box of a tensor at ``offset``, of ``shape``; up to the tensor's end if not given.

    Raises:
        CheckpointError: it is not inside the tensor.
    """
    start = tuple(offset) if offset is not None else (0,) * len(whole)
    rest = tuple(n - o for n, o in zip(whole, start, strict=False))
    box = Box(start, tuple(shape) if shape is not None else rest)
    require(
        box.inside(whole),
        f"{path}: tensor {name!r}",
        f"offset {list(box.offset)}, shape {list(box.shape)}",
        expected=f"a box of the whole shape {list(whole)}",
        error=CheckpointError,
    )
    return box


def model_entry(path: Path | str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the model that a checkpoint says it is of.

    Raises:
        CheckpointError: it says none.
    """
    value = meta.get("model")
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: does not say which model it is of; it was not saved by training here"
        )
    return value


def require_model(path: Path | str, meta: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another model than ``expected``.

    Raises:
        CheckpointError: names the fields that differ.
    """
    different = differences(model_entry(path, meta), expected)
    if different:
        raise CheckpointError(
            f"{path}: a checkpoint of another model: "
            + ", ".join(f"{key} = {there} there, {here} here" for key, there, here in different)
            + "; use the configuration it was saved with, or another directory"
        )


def differences(
    there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    """(dotted key, value there, value here) of every leaf in which two mappings differ."""
    results: list[tuple[str, Any, Any]] = []
    for key in [*there, *(key for key in here if key not in there)]:
        a, b = there.get(key, "absent"), here.get(key, "absent")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            results += differences(a, b, f"{prefix}{key}.")
        elif _plain(a) != _plain(b):
            results.append((f"{prefix}{key}", a, b))
    return results


def _plain(value: Any) -> Any:
    # JSON has no tuples: what was saved as one comes back as a list.
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
