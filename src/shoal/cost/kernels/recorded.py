"""Kernels that a price asks for, with what each takes."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from shoal.cost.kernels.times import KernelTimes

_KERNELS = (
    "product",
    "experts",
    "decode",
    "prompt",
    "latent_decode",
    "latent_prompt",
    "collective",
)


class KernelCall(NamedTuple):
    """One question to the kernel times.

    Args:
        kernel: which.
        size: arguments of the call, as argument=value.
        seconds: of one such kernel.
        source: whose table it comes from.
    """

    kernel: str
    size: str
    seconds: float
    source: str


class RecordedTimes:
    """Kernel times that remember what they are asked.

    Args:
        times: that answer.

    Attributes:
        calls: questions in order.
    """

    def __init__(self, times: KernelTimes) -> None:
        self._times = times
        self.calls: list[KernelCall] = []

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._times, name)
        if name not in _KERNELS:
            return own
        parameters = list(inspect.signature(own).parameters)

        def asked(*given: Any) -> float:
            seconds: float = own(*given)
            if seconds > 0.0:
                words = (
                    f"{key}={_number(one)}" for key, one in zip(parameters, given, strict=True)
                )
                family = "gemm" if name == "product" else name
                form = given[0] if isinstance(given[0], str) else "bf16"
                source = self._times.source(family, form)
                self.calls.append(KernelCall(name, " ".join(words), seconds, source))
            return seconds

        return asked


def _number(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
