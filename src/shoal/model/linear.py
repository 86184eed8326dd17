"""A linear layer that asks which kernel multiplies its rows fastest, for so many rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shoal.core.errors import ModelError
from shoal.kernel.calls import Device, LinearCall
from shoal.kernel.dispatch import dispatch
from shoal.kernel.protocols import Kernel, Ready
from shoal.kernel.tensors import name_of

# Up to so many rows each number of them is asked about by itself.
_EACH = 16
# Numbers of rows that stand for all that are asked for.
_ANY = (*range(1, _EACH + 1), *(1 << power for power in range(5, 15)))


def rows_like(rows: int) -> int:
    """A number of rows that stands for ``rows``: itself, or the next power of two."""
    return rows if rows <= _EACH else 1 << (rows - 1).bit_length()


class DispatchedLinear(nn.Module):
    """``x @ weight.T + bias`` without gradients, by the kernel that dispatch takes.

    Args:
        wanted: backend that must be taken.
        exact: the bits of a row do not depend on the other rows.
        gated: the first half of the rows gate the second, and their product is given.
        pack: let go of the weight where one kernel, which has packed it, does all.
    """

    def __init__(
        self,
        weight_NK: Tensor,
        bias_N: Tensor | None = None,
        *,
        wanted: str | None = None,
        exact: bool = False,
        gated: bool = False,
        pack: bool = True,
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(weight_NK.detach(), requires_grad=False)
        self.bias = None if bias_N is None else nn.Parameter(bias_N.detach(), requires_grad=False)
        self.out_features, self.in_features = weight_NK.shape
        self._dtype = name_of(weight_NK.dtype)
        self._device: Device = "cuda" if weight_NK.is_cuda else "cpu"
        self._wanted, self._exact, self._gated = wanted, exact, gated
        self._by_rows: dict[int, Ready] = {}
        self._by_backend: dict[str, Ready] = {}
        if pack and self.packing() is not None:
            for rows in _ANY:
                self._by_rows[rows] = self._choose(rows)
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        rows = x.numel() // self.in_features
        run = self._by_rows.get(rows)
        if run is None:
            run = self._by_rows[rows] = self._choose(rows)
        out: Tensor = run(x)
        return out

    def kept(self) -> nn.Parameter:
        """The weight [N, K].

        Raises:
            ModelError: a kernel has packed it.
        """
        if self.weight is None:
            raise ModelError("the weight of a layer is packed for inference, and not kept")
        return self.weight

    def replace(self, weight_NK: nn.Parameter) -> None:
        """Replace the weight; later writes to it take effect."""
        self.weight = weight_NK
        # The library's kernel reads the weight where it lies; others may have a copy.
        self._wanted = "torch"
        self._by_rows.clear()
        self._by_backend.clear()

    def dense(self) -> Tensor:
        """The weight [N, K], also where a kernel has packed it; not of gated layers."""
        if self.weight is not None:
            return self.weight
        kernel: Any = self._kernel(1)
        tensor: Tensor = kernel.unpack(self.call(1), self._choose(1))
        return tensor

    def like(self, weight_NK: Tensor) -> DispatchedLinear:
        """A layer with another weight that is computed as this one is."""
        return DispatchedLinear(
            weight_NK,
            self.bias,
            wanted=self._wanted,
            exact=self._exact,
            pack=self.weight is None,
        )

    def packing(self) -> Kernel | None:
        """The kernel that multiplies any number of rows by a weight in an order of its own."""
        chosen = {self._kernel(rows) for rows in _ANY}
        return next(iter(chosen)) if len(chosen) == 1 and all(k.packs for k in chosen) else None

    def call(self, rows: int) -> LinearCall:
        """The kernel call for this number of rows."""
        return LinearCall(
            rows_like(rows),
            self.out_features,
            self.in_features,
            self._dtype,
            self._device,
            self._gated,
        )

    def _kernel(self, rows: int) -> Kernel:
        # Two kernels sum in two orders, so in exact mode one of them computes any number of rows.
        call = self.call(1 if self._exact else rows)
        return dispatch(call, wanted=self._wanted, exact=self._exact)

    def _choose(self, rows: int) -> Ready:
        kernel = self._kernel(rows if self.weight is not None else 1)
        if kernel.backend not in self._by_backend:
            ready = kernel.prepare(self.call(rows), self.weight, self.bias)
            self._by_backend[kernel.backend] = ready
        return self._by_backend[kernel.backend]
