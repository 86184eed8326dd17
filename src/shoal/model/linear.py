"""A linear layer that asks which kernel multiplies its rows fastest, for so many rows."""

from __future__ import annotations

from torch import Tensor, nn

from shoal.kernel.calls import Linear
from shoal.kernel.dispatch import dispatch
from shoal.kernel.protocols import Ready
from shoal.kernel.tensors import name_of

__all__ = ["DispatchedLinear", "rows_like"]

# Up to so many rows each number of them is asked about by itself.
_EACH = 16


def rows_like(rows: int) -> int:
    """A number of rows that stands for ``rows``: itself, or the next power of two."""
    return rows if rows <= _EACH else 1 << (rows - 1).bit_length()


class DispatchedLinear(nn.Module):
    """``x @ weight.T + bias`` without gradients, by the kernel that dispatch takes.

    Args:
        weight_NK: of the layer; kept as it is.
        bias_N: of the layer.
        wanted: backend that must be taken.
        exact: a row has the same bits whatever other rows are computed beside it.
    """

    def __init__(
        self,
        weight_NK: Tensor,
        bias_N: Tensor | None = None,
        *,
        wanted: str | None = None,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_NK.detach(), requires_grad=False)
        self.bias = None if bias_N is None else nn.Parameter(bias_N.detach(), requires_grad=False)
        self.out_features, self.in_features = weight_NK.shape
        self._wanted, self._exact = wanted, exact
        self._by_rows: dict[int, Ready] = {}
        self._by_backend: dict[str, Ready] = {}

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        rows = x.numel() // self.in_features
        run = self._by_rows.get(rows)
        if run is None:
            run = self._by_rows[rows] = self._choose(rows)
        out: Tensor = run(x)
        return out

    def replace(self, weight_NK: nn.Parameter) -> None:
        """Compute with this weight from now on, whatever is written to it later."""
        self.weight = weight_NK
        # The library's kernel reads the weight where it lies; others may have a copy.
        self._wanted = "torch"
        self._by_rows.clear()
        self._by_backend.clear()

    def call(self, rows: int) -> Linear:
        """What is asked for so many rows."""
        return Linear(
            rows_like(rows),
            self.out_features,
            self.in_features,
            name_of(self.weight.dtype),
            "cuda" if self.weight.is_cuda else "cpu",
        )

    def _choose(self, rows: int) -> Ready:
        call = self.call(rows)
        kernel = dispatch(call, wanted=self._wanted, exact=self._exact)
        if kernel.backend not in self._by_backend:
            self._by_backend[kernel.backend] = kernel.prepare(call, self.weight, self.bias)
        return self._by_backend[kernel.backend]
