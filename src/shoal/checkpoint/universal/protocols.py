"""What a pattern promises, and what a source of rank files is.

A pattern is integers only: it says which boxes of a whole tensor each rank holds. Union fills a
whole tensor by them, loading cuts by the same ones, so weights and moments cannot part ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from pydantic import PositiveInt

from shoal.core.config import Value, parse
from shoal.core.errors import require
from shoal.parallel.tensor.slices import Slices

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.universal.spec import UniversalSpec

Shape = tuple[int, ...]

# The weight itself among the tensors of a parameter; the others are the optimizer's.
FP32 = "fp32"

# Axes along which ranks hold different parts of the model.
AXES = ("pp", "ep", "tp")

Copies = Literal["equal", "mean", "none"]
"""What is done with ranks that hold the same: they must be equal, are averaged, or cannot be."""


class Coord(NamedTuple):
    """Where a rank stands; fragments are put together in this order."""

    pp: int = 0
    ep: int = 0
    tp: int = 0
    dp: int = 0

    def __str__(self) -> str:
        return f"pp {self.pp}, tp {self.tp}, dp {self.dp}" + (f", ep {self.ep}" * bool(self.ep))


class RankLayout(Value):
    """How many ranks there are along each axis.

    Args:
        dp: ranks that share the flat buffers of one part of the model.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        ep: expert-parallel ranks.
    """

    dp: PositiveInt = 1
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    ep: PositiveInt = 1

    @classmethod
    def parse(cls, text: str) -> RankLayout:
        """Read ``dp=1,tp=2``.

        Raises:
            ConfigError: another axis, or no number.
        """
        numbers: dict[str, int] = {}
        for word in filter(None, text.split(",")):
            axis, _, size = word.partition("=")
            require(
                axis.strip() in cls.model_fields and size.strip().isdigit(),
                "mesh",
                text,
                expected="axes and sizes such as dp=1,tp=2, of dp, tp, pp and ep",
            )
            numbers[axis.strip()] = int(size)
        return parse(cls, numbers, where="mesh")

    def sizes(self, axes: Sequence[str]) -> Shape:
        """How many ranks along each of some axes."""
        return tuple(int(getattr(self, axis)) for axis in axes)

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in ("dp", "tp", "pp", "ep")}
        return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "1 rank"


class FragmentArrangement(NamedTuple):
    """Where the local tensors of all ranks along a pattern's axes lie in the whole one.

    Args:
        shape: of the whole tensor, without padding.
        slices: of each rank, in the order of its axes.
    """

    shape: Shape
    slices: list[Slices]


class Pattern(Protocol):
    """A part of kind ``pattern``: how the fragments of a parameter combine."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes along which ranks hold different parts; along the others they hold copies."""

    @property
    def copies(self) -> Copies:
        """What is done with copies."""

    @property
    def tolerance(self) -> float:
        """How far copies may be apart."""

    @property
    def arity(self) -> int:
        """Sub-parts that lie behind each other in every rank's tensor."""

    def arrange(self, name: str, local: Sequence[Shape], counts: Shape) -> FragmentArrangement:
        """Where what the ranks hold lies in the whole tensor.

        Args:
            name: the parameter, for messages.
            local: shape of each rank's tensor, in the order of the axes.
            counts: ranks along each axis.

        Raises:
            CheckpointError: shapes that do not fit the pattern.
        """

    def cut(self, name: str, shape: Shape, counts: Shape, at: Shape) -> Slices:
        """What one rank of any layout holds of a whole tensor.

        Args:
            name: the parameter, for messages.
            shape: of the whole tensor.
            counts: ranks along each axis.
            at: which of them.

        Raises:
            CheckpointError: not divisible, and the pattern has no padding.
        """


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of elements of one rank's local tensor, as it lies in a flat buffer.

    Args:
        key: which of its tensors: ``fp32``, ``exp_avg`` ...
        shape: of the local tensor of which it is a run.
        start: its first element in there; None if that follows from the order of the dp ranks.
        tensor: the elements, flat.
    """

    name: str
    key: str
    at: Coord
    shape: Shape
    start: int | None
    tensor: Tensor


class Scalar(NamedTuple):
    """One number of a parameter's optimizer state, such as its step."""

    name: str
    key: str
    value: float


class RankFile(Protocol):
    """One file of a rank, loaded lazily."""

    @property
    def path(self) -> Path:
        """Where it lies."""

    def contents(self) -> Iterator[Fragment | Scalar]:
        """What is in it.

        Raises:
            CorruptError: it is cut or damaged.
            CheckpointError: it holds more than plain data.
        """


class RankDumps(Protocol):
    """Everything that the ranks of one step wrote."""

    path: Path
    layout: RankLayout
    meta: dict[str, Any]

    def files(self) -> Sequence[RankFile]:
        """Every rank's file.

        Raises:
            CheckpointError: one is missing; names it.
        """

    def paths(self) -> Sequence[Path]:
        """Every file that there is."""

    def spec(self) -> UniversalSpec | None:
        """How its fragments combine, if it says so itself."""
