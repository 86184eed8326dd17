"""Entry point of ``spgemm``: matrices of SciPy or PyTorch in, one of the same kind out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.errors import KernelError, nearest, require
from shoal.kernel.spgemm.call import SEMIRINGS, Semiring, SparseDtype, SpGemm

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.protocols import Kernel
    from shoal.kernel.spgemm.csr import Csr

_NUMBERS: dict[SparseDtype, str] = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "int64": "int64",
    "bool": "bool",
}


def spgemm(
    A: Any,
    B: Any,
    semiring: Semiring = "plus_times",
    sort: bool = True,
    *,
    mask: Any = None,
    alpha: float | None = None,
    kernel: str | Kernel | None = None,
) -> Any:
    """``C = alpha A B`` of sparse matrices, with an entry wherever two entries meet.

    Entries that are zero, or become zero, stay. Entries of one place of A or B are added.
    Gradients flow through the values of PyTorch tensors (``plus_times``).

    Args:
        A: [M, K] ``scipy.sparse`` array or ``torch.sparse_csr`` tensor, columns in order.
        B: [K, N], of the same kind.
        semiring: ``plus_times``; ``min_plus``, whose product is a sum and whose sum is the least
            (paths); ``or_and``, for which every value but 0 is true.
        sort: the columns of a row of C are in order; without, a little faster.
        mask: [M, N] of the same kind; only its entries are computed, its values do not matter.
        alpha: times all; in the sense of the semiring.
        kernel: name of the backend, or a kernel; the fastest for these sizes, if not given.

    Returns:
        C: [M, N] of the kind of A. ``or_and`` gives bool.

    Raises:
        KernelError: shapes do not fit, entries are out of range or out of order, or the kernel
            that was asked for cannot.
    """
    import torch

    from shoal.kernel.spgemm.csr import from_any, to_like

    left = from_any("A", A)
    right = left if B is A else from_any("B", B)
    limit = None if mask is None else from_any("mask", mask)
    values = (left.val, right.val)
    if torch.is_grad_enabled() and any(v.requires_grad for v in values):
        from shoal.claims.lab.spgemm.autograd import product

        require(
            semiring == "plus_times",
            "kernel.spgemm semiring",
            semiring,
            expected="plus_times, where gradients are wanted; detach the values otherwise",
            error=KernelError,
        )
        return to_like(product(left, right, limit, alpha, kernel), A)
    made = multiply(left, right, semiring, sort, mask=limit, alpha=alpha, kernel=kernel)
    return to_like(made, A)


def multiply(
    A: Csr,
    B: Csr,
    semiring: Semiring = "plus_times",
    sort: bool = True,
    *,
    mask: Csr | None = None,
    alpha: float | None = None,
    kernel: str | Kernel | None = None,
    keep: bool = False,
) -> Csr:
    """The same for :class:`~.csr.Csr`, whose result also has counters.

    Args:
        A: [M, K], and the rest as of :func:`spgemm`.
        B: [K, N].
        semiring: what times and plus mean.
        sort: columns in order.
        mask: [M, N].
        alpha: times all.
        kernel: name of the backend, or a kernel.
        keep: C has exactly the entries of the mask, zero where nothing meets.
    """
    import torch

    from shoal.kernel.dispatch import dispatch
    from shoal.kernel.spgemm.csr import dtype_name, multiplies

    require(
        semiring in SEMIRINGS,
        "kernel.spgemm semiring",
        semiring,
        expected=f"one of {', '.join(SEMIRINGS)}",
        hint=nearest(str(semiring), SEMIRINGS),
        error=KernelError,
    )
    require(
        A.shape[1] == B.shape[0],
        "kernel.spgemm shapes",
        f"A {list(A.shape)}, B {list(B.shape)}",
        expected=f"as many columns of A as rows of B; here a B with {A.shape[1]} rows",
        error=KernelError,
    )
    require(
        mask is None or mask.shape == (A.shape[0], B.shape[1]),
        "kernel.spgemm mask",
        "no shape" if mask is None else list(mask.shape),
        expected=f"the shape of the result, {[A.shape[0], B.shape[1]]}",
        error=KernelError,
    )
    A, B, scale = _same_numbers(A, B, semiring, alpha)
    dtype = dtype_name(A.val.dtype)
    counted = multiplies(A, B)
    sizes: dict[str, Any] = {
        "m": A.shape[0],
        "k": A.shape[1],
        "n": B.shape[1],
        "nnz_a": A.nnz,
        "nnz_b": B.nnz,
        "multiplies": counted[1],
    }
    about: dict[str, Any] = {name: _about(size) for name, size in sizes.items()}
    call = SpGemm(
        **about,
        semiring=semiring,
        sort=sort,
        masked=mask is not None,
        keep=keep and mask is not None,
        dtype=dtype,
    )
    chosen = dispatch(call, wanted=kernel) if kernel is None or isinstance(kernel, str) else kernel
    known = (counted,) if getattr(chosen, "counted", False) else ()
    made: Csr = chosen.prepare(call)(A, B, mask, scale, *known)
    if made.val.dtype != A.val.dtype:
        return made.with_values(made.val.to(getattr(torch, _NUMBERS[dtype])))
    return made


def _about(size: int) -> int:
    """Rounded up to two leading bits: calls that cost the same look the same to the dispatch."""
    unit = 1 << max(0, size.bit_length() - 2)
    return -(-size // unit) * unit


def _same_numbers(
    A: Csr, B: Csr, semiring: Semiring, alpha: float | None
) -> tuple[Csr, Csr, Tensor | None]:
    """Both with values of one type, and alpha in it."""
    import torch

    if semiring == "or_and":
        dtype = torch.bool
        A, B = (x.with_values(x.val != 0) for x in (A, B))
    else:
        dtype = torch.promote_types(A.val.dtype, B.val.dtype)
        if dtype == torch.bool:
            dtype = torch.int64
        A, B = (x if x.val.dtype == dtype else x.with_values(x.val.to(dtype)) for x in (A, B))
    if alpha is None:
        return A, B, None
    require(
        dtype.is_floating_point or float(alpha).is_integer(),
        "kernel.spgemm alpha",
        alpha,
        expected="a whole number, as the values are",
        error=KernelError,
    )
    return A, B, torch.tensor(alpha, dtype=dtype)
