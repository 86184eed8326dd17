"""CUDA as far as PyTorch plays it without a card: tensors have a device, shapes and no numbers.

Where two devices meet there is an error, and where a number would be needed on the host, too: what
runs here neither mixes devices nor waits for the GPU. Gradients end the process, so there are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


class _Cardless(TorchFunctionMode):
    """Does in another way what asks for the card: indexing, copies and ``~``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__ and args[0].is_cuda:
            return _indexed(*args)
        if func is torch.Tensor.__invert__:
            return aten.bitwise_not(*args)
        if func is torch.Tensor.to and "cuda" in map(_kind, (*args[1:], *kwargs.values())):
            dtypes = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, torch.dtype)]
            return torch.empty(args[0].shape, dtype=(dtypes or [args[0].dtype])[0], device="cuda")
        return func(*args, **kwargs)


def _kind(argument: Any) -> str:
    """The type of a device; what is none gives its own text."""
    return argument.type if isinstance(argument, torch.device) else str(argument)


def _indexed(x: torch.Tensor, key: Any) -> torch.Tensor:
    keys, dim = key if isinstance(key, tuple) else (key,), 0
    if any(one is Ellipsis for one in keys):
        place = next(at for at, one in enumerate(keys) if one is Ellipsis)
        used = sum(one is not None for one in keys) - 1
        keys = (*keys[:place], *[slice(None)] * (x.dim() - used), *keys[place + 1 :])
    for one in keys:
        if one is None:
            x, dim = aten.unsqueeze(x, dim), dim + 1
        elif isinstance(one, int):
            x = aten.select(x, dim, one)
        elif isinstance(one, slice):
            x, dim = aten.slice(x, dim, one.start, one.stop, one.step or 1), dim + 1
        else:
            x, dim = aten.index(x, [None] * dim + [one]), dim + 1
    return x


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Tensors made inside have no numbers."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), _Cardless():
        yield


def placed(model: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """A model that was made in :func:`fake_cuda`, its parameters on the GPU."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            there = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device="cuda")
            setattr(module, name, torch.nn.Parameter(there, requires_grad=False))
    return model
