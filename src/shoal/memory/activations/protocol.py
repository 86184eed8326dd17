"""What autograd saves for the backward pass, and who keeps it where.

A cache is asked for every tensor that is saved (``pack``) and for every one that is needed again
(``unpack``), and notified of the position (``on_module``). What it hands to autograd never holds
the tensor that was saved: a node that held its own result would never be freed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from shoal.core.errors import ModelError
from shoal.core.parts import part
from shoal.ir import Estimate, Interval, Machine, Work

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.memory.activations.cache import TensorCache

Phase = Literal["enter", "leave"]


class Activation(Protocol):
    """A part of kind ``activation``."""

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Seconds of a step that are waited for, and bytes that leave the device, as ``disk``."""

    def notes(self, work: Work, step_s: float) -> tuple[str, ...]:
        """What a plan of a job with steps of so many s should say of it."""

    def apply(self, model: nn.Module) -> TensorCache | None:
        """What keeps it, for a model in training; None if autograd does.

        Raises:
            ConfigError: it cannot work with this model.
        """


_NOTHING = Estimate(step_s=Interval.exact(0.0))


@part
class Keep:
    """Keep saved activations on the device until the backward pass."""

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Nothing."""
        return _NOTHING

    def notes(self, work: Work, step_s: float) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def apply(self, model: nn.Module) -> None:
        """See :class:`Activation`."""


class ResidentTensor:
    """A tensor that stays where it is, and is refused if it was written in the meantime.

    Args:
        tensor: as it was saved.
        scope: where, for the error.
    """

    __slots__ = ("_scope", "_tensor", "_version")

    def __init__(self, tensor: Tensor, scope: str = "") -> None:
        # Detached: shares memory and version, and not the node that holds this.
        self._tensor, self._version, self._scope = tensor.detach(), tensor._version, scope

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            ModelError: it was modified in place.
        """
        check_version(self._tensor, self._version, tuple(self._tensor.shape), self._scope)
        return self._tensor


def check_version(now: Tensor, version: int, shape: tuple[int, ...], scope: str) -> None:
    """Refuse a tensor that was written after it was saved, as autograd does.

    Raises:
        ModelError: it was.
    """
    if now._version != version:
        raise ModelError(
            f"{scope or 'model'}: a tensor {list(shape)} that the backward pass needs was modified "
            f"in place after it was saved: it is at version {now._version}, and {version} was "
            "saved; write to a copy"
        )


def in_backward() -> bool:
    """Whether autograd is on its way back, in this thread."""
    import torch

    return torch._C._current_graph_task_id() != -1


def weight_of_cast(tensor: Tensor) -> Tensor | None:
    """The parameter of which a tensor, or what it is a view of, is a copy in another dtype."""
    base = tensor._base if tensor._is_view() else tensor
    made = None if base is None else base.grad_fn
    if made is None or made.name() != "ToCopyBackward0":
        return None
    weight: Tensor | None = getattr(made.next_functions[0][0], "variable", None)
    return weight
