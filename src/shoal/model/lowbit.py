"""A linear layer whose weights are kept in few bits, computed by the kernel that is fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from shoal.core.errors import KernelError
from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.dispatch import candidates, dispatch
from shoal.kernel.formats import weight_format
from shoal.kernel.protocols import PackedMatrix, Ready
from shoal.kernel.tensors import name_of
from shoal.model.linear import rows_like


class LowBitLinear(nn.Module):
    """``x @ weight.T + bias`` for inference, the weights in a weight format.

    The stored tensors are buffers of the layer, named as in the format (``codes``, ``scales`` ...);
    they keep the dtypes of the format when the layer is cast.

    Args:
        packed: the weights.
        wanted: backend that must be taken.
        exact: the bits of a row do not depend on the other rows.
        activations: what rows are rounded to before the product, such as ``int8``; empty for
            nothing.
        dense: many rows may be multiplied with a copy of the weights of full size, which is
            faster there and takes the memory that the format saves.

    Raises:
        KernelError: the weights are not what their format says.
    """

    def __init__(
        self,
        packed: PackedMatrix,
        bias_N: Tensor | None = None,
        *,
        wanted: str | None = None,
        exact: bool = False,
        activations: str = "",
        dense: bool = False,
    ) -> None:
        super().__init__()
        stored = weight_format(packed.format)
        stored.check(packed)
        self.format, self.bits = packed.format, stored.bits
        self.out_features, self.in_features = packed.shape
        self._stored = tuple(packed.tensors)
        for name, tensor in packed.tensors.items():
            self.register_buffer(name, tensor)
        self.bias = None if bias_N is None else nn.Parameter(bias_N.detach(), requires_grad=False)
        self._wanted, self._exact = wanted, exact
        self._activations, self._dense = activations, dense
        self._by_rows: dict[tuple[int, torch.dtype], Ready] = {}
        self._by_backend: dict[tuple[str, torch.dtype], Ready] = {}
        self.register_load_state_dict_post_hook(_loaded)  # type: ignore[no-untyped-call]

    @classmethod
    def from_linear(cls, linear: nn.Linear, fmt: str, **options: Any) -> Self:
        """A layer's weights rounded to the nearest of a format, such as ``int4-g128``.

        Args:
            linear: keeps its own weights.
            fmt: text of the weight format.
            options: as of the class.

        Raises:
            KernelError: no such format, K does not divide, or a weight is not finite.
        """
        packed = weight_format(fmt).quantize(linear.weight)
        return cls.from_packed(packed, linear.bias, **options)

    @classmethod
    def from_packed(
        cls, packed: PackedMatrix, bias_N: Tensor | None = None, **options: Any
    ) -> Self:
        """The same for weights that are already quantized, by any method."""
        return cls(packed, bias_N, **options)

    def use(self, *, wanted: str | None = None, exact: bool = False) -> None:
        """Take another backend from now on; arguments as of the class."""
        self._wanted, self._exact = wanted, exact
        self._forget()

    @property
    def packed(self) -> PackedMatrix:
        """The weights as they are stored."""
        tensors = {name: getattr(self, name) for name in self._stored}
        return PackedMatrix(self.format, (self.out_features, self.in_features), tensors)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        rows = x.numel() // self.in_features
        run = self._by_rows.get((rows, x.dtype))
        if run is None:
            run = self._by_rows[rows, x.dtype] = self._choose(rows, x)
        if x.requires_grad and torch.is_grad_enabled():
            raise KernelError(
                f"layer of {self.format}: its rows want a gradient, which low-bit layers do not "
                "give; compute under torch.no_grad()"
            )
        out: Tensor = run(x)
        return out

    def call(self, rows: int, dtype: torch.dtype = torch.bfloat16) -> LowbitLinearCall:
        """The kernel call for this number of rows."""
        return LowbitLinearCall(
            rows_like(max(1, rows)),
            self.out_features,
            self.in_features,
            self.format,
            self.bits,
            name_of(dtype),
            "cuda" if getattr(self, self._stored[0]).is_cuda else "cpu",
            self._activations,
        )

    def backend(self, rows: int, dtype: torch.dtype = torch.bfloat16) -> str:
        """The backend that computes so many rows.

        Raises:
            KernelError: none can.
        """
        # Two kernels sum in two orders, so in exact mode one of them computes any number of rows.
        call = self.call(1 if self._exact else rows, dtype)
        chosen = dispatch(call, wanted=self._wanted, exact=self._exact).backend
        if chosen != "dequantised" or self._dense or self._wanted is not None:
            return chosen
        return next((other for other, _ in candidates(call) if other != chosen), chosen)

    def _choose(self, rows: int, x: Tensor) -> Ready:
        if x.shape[-1] != self.in_features:
            raise KernelError(
                f"layer of {self.format}: rows {list(x.shape)}: expected [..., {self.in_features}]"
            )
        backend = self.backend(rows, x.dtype)
        if (backend, x.dtype) not in self._by_backend:
            call = self.call(rows, x.dtype)
            kernel = dispatch(call, wanted=backend, exact=self._exact)
            self._by_backend[backend, x.dtype] = kernel.prepare(call, self.packed, self.bias)
        return self._by_backend[backend, x.dtype]

    def _forget(self) -> None:
        self._by_rows.clear()
        self._by_backend.clear()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        stored = [getattr(self, name) for name in self._stored]

        def kept(tensor: Tensor) -> Tensor:
            moved: Tensor = fn(tensor)
            if moved.dtype == tensor.dtype or not any(tensor is other for other in stored):
                return moved
            return tensor.to(moved.device)

        super()._apply(kept, recurse)  # type: ignore[no-untyped-call]
        self._forget()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy prepares kernels for its own memory.
        return {**self.__dict__, "_by_rows": {}, "_by_backend": {}}

    def extra_repr(self) -> str:
        """As other layers of PyTorch say it."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"format={self.format}, bias={self.bias is not None}"
        )


def _loaded(layer: nn.Module, _keys: object) -> None:
    if isinstance(layer, LowBitLinear):
        layer._forget()
