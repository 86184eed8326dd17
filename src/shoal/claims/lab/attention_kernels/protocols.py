"""What attention kernels promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol

from shoal.ir.mask import Mask

if TYPE_CHECKING:
    from torch import Tensor


class AttentionKernelPart(Protocol):
    """A part of kind ``attention_kernel``: one way to compute attention under a typed mask.

    Attributes:
        name: as in the table.
        compiled: the first call compiles, so that it is neither timed nor watched.
    """

    name: ClassVar[str]
    compiled: ClassVar[bool]

    def refuses(
        self, mask: Mask, *, dtype: str = "fp32", device: str = "cpu", backward: bool = True
    ) -> str | None:
        """Why this kernel cannot compute that, or None if it can."""
        ...

    def prepare(
        self, mask: Mask, *, dtype: str = "fp32", device: str = "cpu"
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Attention of q [B, H, T, d] over k and v [B, K, S, d] under ``mask``.

        Raises:
            ConfigError: this kernel cannot compute that; says why.
        """
        ...

    def cells(self, mask: Mask) -> int:
        """Cells whose score is computed; the seen ones and those that are wasted."""
        ...

    def held_bytes(self, mask: Mask, heads: int) -> int:
        """Bytes that grow with T x S, for the mask and for scores."""
        ...
