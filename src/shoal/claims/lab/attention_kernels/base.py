"""What all attention kernels have in common: what they can do, and queries that see nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from shoal.core.errors import ConfigError, require
from shoal.ir.mask import Mask

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Prepared = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]

# Short name -> name in torch.
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class AttentionKernel:
    """Base of the parts: a part adds ``_prepare``, and ``_refuses`` and ``cells`` if it differs.

    Attributes:
        name: as in the table.
        dtypes: short names of the types it computes in.
        devices: where it runs.
        backward: where it has gradients.
        compiled: the first call compiles, so that it is neither timed nor watched.
    """

    name: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "bf16", "fp16")
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    backward: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    compiled: ClassVar[bool] = False

    def refuses(
        self, mask: Mask, *, dtype: str = "fp32", device: str = "cpu", backward: bool = True
    ) -> str | None:
        """Why this kernel cannot compute that, or None if it can.

        Args:
            mask: what is seen.
            dtype: fp64, fp32, bf16 or fp16.
            device: cpu or cuda.
            backward: gradients are wanted too.
        """
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if dtype not in self.dtypes:
            return f"computes in {', '.join(self.dtypes)}"
        if backward and device not in self.backward:
            return f"has no gradient on {device}"
        return self._refuses(mask)

    def prepare(self, mask: Mask, *, dtype: str = "fp32", device: str = "cpu") -> Prepared:
        """Attention under ``mask``, ready to be called as often as wanted.

        Args:
            mask: what is seen, [T, S].
            dtype: of q, k and v.
            device: where they lie.

        Returns:
            A function of q [B, H, T, d], k and v [B, K, S, d], K a divisor of H, that gives
            [B, H, T, d], zero where nothing is seen.

        Raises:
            ConfigError: this kernel cannot compute that; says why.
        """
        require(dtype in DTYPES, "dtype", dtype, expected=f"one of {', '.join(DTYPES)}")
        reason = self.refuses(mask, dtype=dtype, device=device, backward=False)
        if reason is not None:
            raise ConfigError(
                f"attention_kernel.{self.name} for {dtype} on {device}: it {reason}; "
                "choose another kernel"
            )
        import torch

        return self._prepare(mask, getattr(torch, DTYPES[dtype]), torch.device(device))

    def cells(self, mask: Mask) -> int:
        """Cells whose score the kernel computes; the seen ones and those that it wastes."""
        return mask.num_queries * mask.num_keys

    def held_bytes(self, mask: Mask, heads: int) -> int:
        """Bytes that grow with T x S: what a user must have for the mask and for scores.

        Args:
            mask: what is seen.
            heads: query heads times sequences.
        """
        # A table of cells, once as bool and once as numbers to add.
        return 5 * mask.num_queries * mask.num_keys

    def _refuses(self, mask: Mask) -> str | None:
        return None

    def _prepare(self, mask: Mask, dtype: torch.dtype, device: torch.device) -> Prepared:
        raise TypeError(f"{type(self).__name__} cannot run")
