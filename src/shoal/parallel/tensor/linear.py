"""Linear layers that are split over ranks and whose weight gradients can wait.

A backward pass has two halves: the gradient of the input, which the stage before waits for,
and that of the weights, which no pass waits for before the optimizer. While a
:class:`WeightGradients` is open, these layers compute the first half and note the second;
its ``run`` does what was noted. Both ways the same products are taken and added in the same
order, so the gradients are equal to the bit.

The layers communicate within their own passes, so that a reduction of input gradients
travels while the weight gradient is computed.

Source: Shoeybi et al., Megatron-LM, 2019; Qi et al., Zero Bubble Pipeline Parallelism, 2024.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.kernel.grouped.product import multiply
from shoal.kernel.tensors import compute_dtype
from shoal.parallel.overlap.tile import gathered_product, reduced_product, scattered_product
from shoal.parallel.tensor.operators import TAG, gathered, local_tokens, reduced, scattered

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm, Pending


class WeightGradients:
    """Weight gradients that were put off, of one stage and micro-batch.

    Open it as a context around the backward pass; :meth:`run` it later, once. Hooks on parameters
    (``register_post_accumulate_grad_hook``) are called by both passes, by the first one before the
    gradient is there: code that counts them must not count while this is open.
    """

    # Ranks may be threads of one process, and each has its own open one.
    _open: dict[int, WeightGradients] = {}

    def __init__(self) -> None:
        self._waiting: list[Callable[[], tuple[Tensor, Tensor]]] = []

    def __enter__(self) -> Self:
        self._open[threading.get_ident()] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._open[threading.get_ident()]

    def __len__(self) -> int:
        return len(self._waiting)

    @classmethod
    def current(cls, device: torch.device) -> WeightGradients | None:
        """The one that is open around the backward pass under way."""
        if not cls._open:
            return None
        if device.type == "cpu":
            return cls._open.get(threading.get_ident())
        # Autograd has a thread of its own for other devices, where a process is one rank.
        return next(iter(cls._open.values()), None)

    def put_off(self, gradient: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Note a function that returns a parameter and its gradient."""
        self._waiting.append(gradient)

    def run(self) -> None:
        """Add every gradient that was put off to its parameter's, as autograd does."""
        waiting, self._waiting = self._waiting, []
        waiting.reverse()
        while waiting:
            # Through autograd, so that hooks on a parameter's gradient are called; one by
            # one from the list, so that activations are freed on the way.
            parameter, gradient = waiting.pop()()
            torch.autograd.backward([parameter], [gradient])


def _of_parameters(
    ctx: Any, x_NI: Tensor, grad_NO: Tensor, own_nO: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``ctx.weight`` and ``ctx.bias``; nothing now if they are put off.

    Autograd casts what it is given to the parameters' dtype.

    Args:
        ctx: of the forward pass.
        x_NI: input of the product.
        grad_NO: gradient of its output.
        own_nO: the rows of that which reached the bias on this rank.
    """
    _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    store = WeightGradients.current(grad_NO.device)
    if store is None:
        return (
            torch.mm(grad_NO.t(), x_NI) if needs_weight else None,
            own_nO.sum(0) if needs_bias else None,
        )
    weight, bias = ctx.weight, ctx.bias
    if needs_weight:
        store.put_off(lambda: (weight, torch.mm(grad_NO.t(), x_NI)))
    if needs_bias:
        store.put_off(lambda: (bias, own_nO.sum(0)))
    return None, None


class _Whole(torch.autograd.Function):
    """``x @ weight.T + bias`` on one rank, in few words: it is called for every small matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = compute_dtype(x)
        x, cast = x.to(dtype), weight.to(dtype)
        ctx.weight, ctx.bias = weight, bias
        ctx.save_for_backward(x, cast)
        return F.linear(x, cast, bias if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, cast = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1])
        out = torch.mm(grad_NO, cast).view(x.shape) if ctx.needs_input_grad[0] else None
        x_NI = x.reshape(-1, x.shape[-1])
        return out, *_of_parameters(ctx, x_NI, grad_NO, grad_NO)


class _Split(torch.autograd.Function):
    """``x @ weight.T + bias`` with the communication that belongs to the layer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: WholeLinear, total: int
    ) -> Tensor:
        dtype = compute_dtype(x)
        ctx.weight, ctx.bias, ctx.layer, ctx.travelling = weight, bias, layer, layer.travelling
        x_NI, cast = x.to(dtype), weight.to(dtype)
        out: Tensor | None = None
        if layer.gathers_input and layer.tiled:
            x_NI, out = gathered_product(x_NI.contiguous(), cast.T, layer.comm, total)
        elif layer.gathers_input:
            x_NI = gathered(x_NI, layer.comm, total)
        ctx.save_for_backward(x_NI, cast)
        if not layer.reduces_output and out is None:
            return F.linear(x_NI, cast, None if bias is None else bias.to(dtype))
        if layer.reduces_output and layer.tiled:
            product = scattered_product if layer.sp else reduced_product
            out, pending = product(x_NI, cast.T, layer.comm)
            pending.wait()
        elif out is None:
            out = F.linear(x_NI, cast)
            if layer.late:
                layer.pending = layer.comm.all_reduce(out, tag=TAG)
                return out
            out = scattered(out, layer.comm) if layer.sp else reduced(out, layer.comm)
        return out if bias is None else out.add_(bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, cast = ctx.saved_tensors
        layer: WholeLinear = ctx.layer
        grad_NO = grad_nO
        if layer.reduces_output and layer.sp:
            grad_NO = gathered(grad_nO, layer.comm, len(x_NI))
        out: Tensor | None = None
        pending: Pending | None = None
        if ctx.needs_input_grad[0]:
            out = torch.mm(grad_NO, cast)
            if layer.gathers_input:
                out, pending = _scatter_later(out, layer.comm)
            elif layer.copies_input:
                pending = layer.comm.all_reduce(out, tag=TAG)
        if ctx.travelling is not None and pending is not None and out is not None:
            ctx.travelling.append((out, pending))
            pending = None
        # While the gradient of the input travels.
        of_weight, of_bias = _of_parameters(ctx, x_NI, grad_NO, grad_nO)
        if pending is not None:
            pending.wait()
        return out, of_weight, of_bias, None, None


def _scatter_later(x_ND: Tensor, comm: Comm) -> tuple[Tensor, Pending]:
    rows = local_tokens(len(x_ND), comm.world)
    missing = rows * comm.world - len(x_ND)
    whole = F.pad(x_ND, (0, 0, 0, missing)) if missing else x_ND
    out = whole.new_empty(rows, *whole.shape[1:])
    return out, comm.reduce_scatter(out, whole, tag=TAG)


class WholeLinear(nn.Linear):
    """A whole linear layer whose weight gradient can be put off."""

    comm: Comm
    sp = tiled = late = False
    pending: Pending | None = None
    travelling: list[tuple[Tensor, Pending]] | None = None
    gathers_input = copies_input = reduces_output = False

    @classmethod
    def of(cls, layer: nn.Linear, comm: Comm, *, sp: bool = False, overlap: str = "none") -> Self:
        """Take over the parameters of ``layer``, which are this rank's part."""
        bias = layer.bias is not None
        made = cls(layer.in_features, layer.out_features, bias=bias, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
        made.comm = comm
        split = comm.world > 1
        made.sp = sp and split
        made.tiled = overlap == "tile" and split
        made._prepare(split)
        return made

    def _prepare(self, split: bool) -> None:
        """Say what is to be sent."""

    def forward(self, x: Tensor, total: int = 0) -> Tensor:
        """[..., O]; with communication [N, O].

        Args:
            x: [..., I]; with communication [N, I], or the rank's [n, I] of sequence parallelism.
            total: tokens N, where the rows of ``x`` are a share of them.
        """
        if self.gathers_input or self.copies_input or self.reduces_output:
            out: Tensor = _Split.apply(  # type: ignore[no-untyped-call]
                x, self.weight, self.bias, self, total
            )
        elif not torch.is_grad_enabled() or torch.compiler.is_compiling():
            out = F.linear(x, self.weight, self.bias)
        else:
            out = _Whole.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


class ColumnLinear(WholeLinear):
    """A rank has some of the output's columns: of the heads, or of the feed-forward width.

    The input is whole on every rank, or with sequence parallelism gathered.
    """

    def _prepare(self, split: bool) -> None:
        self.gathers_input, self.copies_input = split and self.sp, split and not self.sp


class _Arrived(torch.autograd.Function):
    """Nothing, but on the way back a sum that travelled on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, travelling: list[tuple[Tensor, Pending]]) -> Tensor:
        ctx.travelling = travelling
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if not ctx.travelling:
            return grad, None
        # What autograd brings is the same, but perhaps a copy of it from before the sum.
        out, pending = ctx.travelling.pop()
        pending.wait()
        return out, None


class LateColumnLinear(ColumnLinear):
    """A column-parallel layer with an asynchronous all-reduce of its input gradient.

    The wait is after the backward pass of the previous sub-layer, which in a ladder does not depend
    on it: autograd runs in reverse order, so the wait is placed before that sub-layer in the
    forward pass.

    Source: Zhang et al., Ladder-Residual, 2025.
    """

    # By thread, as autograd counts: the place where the newest sub-layer begins.
    _begun = threading.local()

    def forward(self, x: Tensor, total: int = 0) -> Tensor:
        """As of :class:`ColumnLinear`."""
        if not (self.copies_input and torch.is_grad_enabled() and x.requires_grad):
            return super().forward(x, total)
        self.travelling = []
        x = _Arrived.apply(x, self.travelling)  # type: ignore[no-untyped-call]
        out = super().forward(x, total)
        self.travelling = None
        node: Any = x.grad_fn
        begun = node._sequence_nr()
        before = getattr(self._begun, "number", 0)
        node._set_sequence_nr(min(begun, before))
        self._begun.number = begun
        return out


class RowLinear(WholeLinear):
    """A rank has some of the input's columns; the ranks' products are summed.

    The bias, whole on every rank, is added once, after the sum. With sequence parallelism
    a rank keeps its share of the tokens of the sum.
    """

    def _prepare(self, split: bool) -> None:
        self.reduces_output = split


class _Landed(torch.autograd.Function):
    """A sum over ranks that was on its way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending) -> Tensor:
        pending.wait()
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class LateRowLinear(RowLinear):
    """A row-parallel layer with an asynchronous all-reduce; the returned function waits for it.

    Source: Zhang et al., Ladder-Residual, 2025.
    """

    late = True

    def forward(self, x: Tensor, total: int = 0) -> Any:
        """A function that gives [N, O] once the sum is there; [..., O] itself on one rank."""
        if not self.reduces_output:
            return super().forward(x, total)
        out: Tensor = _Split.apply(x, self.weight, None, self, total)  # type: ignore[no-untyped-call]
        pending, self.pending = self.pending, None
        bias = self.bias

        def landed() -> Tensor:
            whole: Tensor = _Landed.apply(out, pending)  # type: ignore[no-untyped-call]
            return whole if bias is None else whole + bias.to(whole.dtype)

        return landed


def _later(weight: Tensor, gradient: Callable[[], Tensor]) -> bool:
    store = WeightGradients.current(weight.device)
    if store is None:
        return False
    store.put_off(lambda: (weight, gradient()))
    return True


def grouped(
    rows_MI: Tensor,
    weight_EOI: Tensor,
    counts: Sequence[int],
    backend: str | None = None,
    again: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Each expert's matrix with its own rows, which lie behind each other; [M, O].

    Args:
        rows_MI: by expert.
        weight_EOI: of the experts.
        counts: rows of each.
        backend: the kernel that must be taken, where one is wanted.
        again: gives the weights for the backward pass, where they are not to be kept.
    """
    return multiply(rows_MI, weight_EOI, counts, backend=backend, later=_later, again=again)
