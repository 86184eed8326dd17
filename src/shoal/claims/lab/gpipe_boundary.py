"""What crosses between the cells of a GPipe: boundaries, and tensors that are saved for later.

A boundary holds what comes by and every saved tensor that a later cell uses, as one message whose
form (dtype, shapes) both of its ends know.

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism, 2018. Explicit skips: Kim et al., torchgpipe, 2020.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.core.errors import require

# Dtypes of a boundary; numbers of the header that says its form, and the first of them.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HEADER = 128
FINE = 1


class Save(nn.Module):
    """Keeps what comes by for a later :class:`Use` of this name; passes it on unchanged."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """``x``."""
        return x


class Use(nn.Module):
    """Joins what comes by with what was saved, by their sum if ``join`` is not given."""

    def __init__(self, name: str, join: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        super().__init__()
        self.name, self.join = name, join

    def forward(self, x: Tensor, saved: Tensor) -> Tensor:
        """Both joined."""
        return self.join(x, saved)


@dataclass(frozen=True)
class Form:
    """The tensors of a boundary: what comes by, and the saved ones that cross it."""

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]

    def empty(self, device: torch.device) -> Tensor:
        """Room for it: the tensor itself, or several as one row of numbers."""
        if len(self.shapes) == 1:
            return torch.empty(self.shapes[0], dtype=self.dtype, device=device)
        return torch.empty(sum(map(math.prod, self.shapes)), dtype=self.dtype, device=device)

    def unpack(self, x: Tensor) -> list[Tensor]:
        """The tensors of a message, as views of it."""
        if len(self.shapes) == 1:
            return [x]
        parts = torch.split(x, [math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    @staticmethod
    def pack(parts: Sequence[Tensor]) -> Tensor:
        """The message of these tensors, what comes by first."""
        return parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])

    def header(self) -> Tensor:
        """The form as [128] numbers.

        Raises:
            ConfigError: there are more tensors, or dimensions, than that.
        """
        numbers = [FINE, DTYPES.index(self.dtype), len(self.shapes)]
        for shape in self.shapes:
            numbers += [len(shape), *shape]
        require(
            len(numbers) <= HEADER,
            "gpipe boundary",
            f"{len(self.shapes)} tensors",
            expected="fewer saved tensors across it, or fewer dimensions",
        )
        return torch.tensor(numbers + [0] * (HEADER - len(numbers)))

    @classmethod
    def of(cls, header: Tensor) -> Form:
        """The form that a header says."""
        _, dtype, count, *rest = header.tolist()
        shapes = []
        for _ in range(count):
            dims, rest = rest[0], rest[1:]
            shapes.append(tuple(rest[:dims]))
            rest = rest[dims:]
        return cls(DTYPES[dtype], tuple(shapes))


@dataclass
class Micro:
    """One micro-batch on one rank.

    ``entry``, ``exit``: forms of what its cell gets and gives, None at the ends; ``awaited``: forms
    of the messages that it gets, in the order of its passes.
    """

    number: int
    inputs: Tensor
    targets: Tensor | None
    weight: float
    step: int
    entry: Form | None
    exit: Form | None
    awaited: deque[Form] = field(default_factory=deque)


class FormBoundary:
    """What crosses between cells, for the pipeline's runtime: forms that both ends know."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def buffer(self, mb: Micro) -> Tensor:
        """Room for the next message of this micro-batch."""
        return mb.awaited.popleft().empty(self.device)

    def incoming(self, x: Tensor, mb: Micro) -> Tensor:
        """``x``, as it came."""
        return x

    def outgoing(self, x: Tensor) -> Tensor:
        """``x`` as it is sent."""
        return x.detach().contiguous()


def skips(layers: Sequence[nn.Module]) -> dict[str, tuple[int, int]]:
    """Name -> layer that saves it and layer that uses it.

    Raises:
        ConfigError: a pair that is none.
    """
    saved: dict[str, int] = {}
    skipped: dict[str, tuple[int, int]] = {}
    for number, layer in enumerate(layers):
        if isinstance(layer, Save):
            require(
                layer.name not in saved,
                f"gpipe layer {number}: Save",
                layer.name,
                expected="a name of its own",
            )
            saved[layer.name] = number
        elif isinstance(layer, Use):
            require(
                layer.name in saved and layer.name not in skipped,
                f"gpipe layer {number}: Use",
                layer.name,
                expected="a name that an earlier layer saves, once",
                hint=f"saved before it and not used yet: {sorted(saved.keys() - skipped.keys())}",
            )
            skipped[layer.name] = (saved[layer.name], number)
    unused = sorted(saved.keys() - skipped.keys())
    require(not unused, "gpipe: Save", ", ".join(unused), expected="a later Use of the same name")
    return skipped


def crossing(opened: Mapping[str, tuple[int, int]], cut: int) -> tuple[str, ...]:
    """Names saved before layer ``cut`` and used from it on."""
    return tuple(name for name, (start, end) in opened.items() if start < cut <= end)
