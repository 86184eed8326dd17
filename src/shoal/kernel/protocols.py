"""What kernels, weight formats and cache formats promise.

An *operator* is a name with a meaning: what it computes is what its kernel ``reference``
computes, in plain torch, in any floating-point type. Its other kernels are faster, each in
one file. A :class:`Call` says what is asked of an operator, in shapes and types alone, so
that a kernel can refuse it, or say what it would cost, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from shoal.ir import Estimate, Machine

if TYPE_CHECKING:
    from torch import Tensor

Ready = Callable[..., Any]
"""A kernel with what is constant between its calls: tensors in, tensors out."""


class Call(Protocol):
    """One call of an operator. Frozen and hashable: dispatch remembers what it chose."""

    @property
    def op(self) -> str:
        """The operator."""

    @property
    def device(self) -> str:
        """Cpu or cuda."""

    @property
    def flops(self) -> float:
        """Arithmetic operations, a multiply-add counting two."""

    @property
    def moved_bytes(self) -> float:
        """Bytes that any kernel must read or write once."""


class Kernel(Protocol):
    """A part of kind ``kernel``, called ``OP.BACKEND``: one way to compute one operator.

    Attributes:
        backend: how: reference, cpp, triton, or the peer it wraps, such as torch.
        invariant: the bits of a row of its result do not depend on the values or the number of
            other rows.
        gates: it computes products of which half gate the others.
        packs: its prepared form contains the repacked constants.
    """

    op: ClassVar[str]
    backend: ClassVar[str]
    invariant: ClassVar[bool]
    gates: ClassVar[bool]
    packs: ClassVar[bool]

    def refuses(self, call: Any) -> str | None:
        """Why it cannot compute that here, or None if it can."""

    def interpreted(self, call: Any) -> bool:
        """Whether it would run in an interpreter there, so that it is taken by name only."""

    def estimate(self, call: Any, machine: Machine) -> Estimate:
        """What the call costs, its operands in main memory; allocates nothing."""

    def prepare(self, call: Any, *constants: Any) -> Ready:
        """The kernel for calls like this one, ready to be called as often as wanted.

        Args:
            call: shapes and types; what of it may differ later is said by the operator.
            constants: what stays the same between calls, such as weights; copied or
                repacked where the kernel wants them otherwise.

        Raises:
            KernelError: it refuses the call, or a constant is not what the call says.
        """


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [N, K] in a weight format, as it is stored.

    Args:
        format: text of the format, such as ``int4-g128``.
        shape: (N, K): outputs and inputs of the layer.
        tensors: name -> tensor, as the format defines them: ``codes`` (uint8 [N, row bytes],
            little-endian bit stream of each row), ``scales`` [N, K / group], and what else
            it needs.
    """

    format: str
    shape: tuple[int, int]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class WeightFormat(Protocol):
    """A part of kind ``weight_format``: how a matrix is stored in few bits.

    ``str(format)`` is its short text, which :func:`shoal.kernel.formats.weight_format` reads.
    """

    @property
    def bits(self) -> float:
        """Bits of a weight, scales included, for long rows."""

    @property
    def code_bits(self) -> int:
        """Bits of a code."""

    def group_of(self, k: int) -> int:
        """Weights of a row that share a scale; K where a row has one.

        Raises:
            KernelError: ``k`` is not a multiple of the group; names the nearest that is.
        """

    def quantize(self, weight_NK: Tensor) -> PackedMatrix:
        """Round to nearest.

        Raises:
            KernelError: K does not divide, or a weight is NaN or infinite (named by place).
        """

    def dequantize(self, packed: PackedMatrix) -> Tensor:
        """[N, K] in fp32, exactly what the codes mean."""


class KVFormat(Protocol):
    """A part of kind ``kv_format``: how the paged cache keeps keys and values."""

    def token_bytes(self, head_dim: int, *, dtype_bytes: int) -> float:
        """Bytes of the key or the value of one token and one head."""

    def refuses(self, head_dim: int) -> str | None:
        """Why heads of this size cannot be stored, or None if they can."""

    def layout(self, head_dim: int, dtype: str) -> tuple[tuple[int, str], ...]:
        """Numbers a token and head, and their type, of every stored tensor."""

    def encode(self, x_NKd: Tensor) -> tuple[Tensor, ...]:
        """What is stored of N tokens, K heads: tensors whose first dimensions are [N, K]."""

    def decode(self, *stored: Tensor) -> Tensor:
        """[N, K, d] in fp32, exactly what the stored codes mean."""
