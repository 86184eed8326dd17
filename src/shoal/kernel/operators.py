"""Operators of PyTorch as a mode sees them: their tensors, and no compiler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees every operator of code that is not compiled.

    PyTorch hides what a mode does from its compiler, which it imports for that before the first
    operator: as long as importing the rest of PyTorch takes.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among the arguments or the results of an operator.

    They lie in tuples, lists and dicts. ``torch.utils._pytree`` looks for other places too, which
    takes longer than a small operator.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
