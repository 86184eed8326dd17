"""A sparse matrix in rows, as the kernels see it; from and to SciPy's and PyTorch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from shoal.core.errors import KernelError, require
from shoal.core.native import compiler
from shoal.kernel.native import function
from shoal.kernel.spgemm.call import SparseDtype

_MAX_COLUMNS = 2**31 - 1
_NAMES: dict[torch.dtype, SparseDtype] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "int64",
    torch.bool: "bool",
}
_WHAT = {
    1: ("row pointers that decrease or do not end at the number of entries", "rebuild it"),
    2: ("a column outside the matrix", "rebuild it"),
    3: ("unsorted columns", "call sort_indices(), or coalesce and to_sparse_csr() in PyTorch"),
}


@dataclass(frozen=True, slots=True)
class Counters:
    """What one product took.

    Args:
        multiplies: products of two entries.
        probes: probes of hash tables per hashed product; 0 without hashed products.
        dense_rows: rows, or pieces of rows, that were summed in a dense range.
        hash_rows: rows, or pieces of rows, that were summed in a hash table.
        pieces: of them, pieces of rows that are too long for one table.
        repeated_rows: short rows whose products stood as those of the row before, moved along,
            and were added as those were.
        windows: of consecutive rows that a thread takes at once.
        table_bytes: the most memory, beyond A, B and C.
        imbalance: multiplies of the busiest thread over those of an average one.
        a_bytes: read of A.
        b_bytes: read of B, from memory or a cache.
        c_bytes: written of C.
    """

    multiplies: int
    table_bytes: int
    probes: float = 0.0
    dense_rows: int = 0
    hash_rows: int = 0
    pieces: int = 0
    repeated_rows: int = 0
    windows: int = 0
    imbalance: float = 1.0
    a_bytes: int = 0
    b_bytes: int = 0
    c_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Csr:
    """A sparse matrix [M, N] of E entries; columns do not fall within a row.

    Args:
        shape: (M, N).
        ptr: int64 [M + 1]: where each row begins.
        col: int32 [E].
        val: [E].
        counters: of the product that made it.
    """

    shape: tuple[int, int]
    ptr: Tensor
    col: Tensor
    val: Tensor
    counters: Counters | None = None

    @property
    def nnz(self) -> int:
        """E."""
        return self.col.numel()

    def with_values(self, val_E: Tensor) -> Csr:
        """The same entries with other values."""
        return Csr(self.shape, self.ptr, self.col, val_E.contiguous())

    def scipy(self) -> Any:
        """A ``scipy.sparse.csr_array`` of the same memory; bf16 and fp16 as fp32."""
        values = self.val.detach()
        values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        ptr, col = self.ptr.numpy(), self.col.numpy()
        if self.nnz <= _MAX_COLUMNS:
            ptr = ptr.astype(np.int32)
        else:
            col = col.astype(np.int64)
        return scipy.sparse.csr_array((values.numpy(), col, ptr), shape=self.shape)


def dtype_name(dtype: torch.dtype) -> SparseDtype:
    """Its short name.

    Raises:
        KernelError: no kernel multiplies such numbers.
    """
    require(
        dtype in _NAMES,
        "kernel.spgemm dtype",
        str(dtype),
        expected=", ".join(str(known) for known in _NAMES),
        error=KernelError,
    )
    return _NAMES[dtype]


def from_any(name: str, matrix: Any) -> Csr:
    """A matrix of SciPy or PyTorch in rows, checked; its memory, where types allow.

    Args:
        name: for messages: A, B or mask.
        matrix: ``scipy.sparse`` array or matrix of any format, ``torch.sparse_csr`` tensor or a
            :class:`Csr`.

    Raises:
        KernelError: it is none of these, or its entries are out of range or out of order.
    """
    if isinstance(matrix, Csr):
        result = matrix
    elif scipy.sparse.issparse(matrix):
        given: Any = matrix
        rows = given.tocsr()
        values = _shared(rows.data)
        if values.dtype not in _NAMES and not values.dtype.is_complex:
            values = values.to(torch.int64)
        result = Csr(
            _shape(name, rows.shape),
            _shared(rows.indptr).to(torch.int64),
            _narrow(name, _shared(rows.indices), rows.shape),
            values,
        )
    elif isinstance(matrix, Tensor) and matrix.layout == torch.sparse_csr:
        result = Csr(
            _shape(name, matrix.shape),
            matrix.crow_indices().to(torch.int64).contiguous(),
            _narrow(name, matrix.col_indices(), matrix.shape),
            matrix.values().contiguous(),
        )
    else:
        raise KernelError(
            f"kernel.spgemm {name}: {type(matrix).__name__}; expected a scipy.sparse array or a "
            "torch sparse CSR tensor (tensor.to_sparse_csr())"
        )
    dtype_name(result.val.dtype)
    _check(name, result)
    return result


def to_like(result: Csr, like: Any) -> Any:
    """The result as the kind of matrix that ``like`` is."""
    if isinstance(like, Csr):
        return result
    if isinstance(like, Tensor):
        index = like.col_indices().dtype
        fits = result.nnz <= _MAX_COLUMNS
        index = index if fits else torch.int64
        return torch.sparse_csr_tensor(
            result.ptr.to(index),
            result.col.to(index),
            result.val,
            result.shape,
            check_invariants=False,
        )
    made = result.scipy()
    return made if isinstance(like, scipy.sparse.sparray) else scipy.sparse.csr_matrix(made)


def multiplies(A: Csr, B: Csr) -> tuple[Tensor, int]:
    """Products of each row of A B, int64 [M], and their sum."""
    if compiler() is None:
        per_entry = B.ptr.diff()[A.col.long()]
        total = torch.cat([per_entry.new_zeros(1), per_entry.cumsum(0)])
        each = total[A.ptr].diff()
        return each, int(total[-1])
    each = torch.empty(A.shape[0], dtype=torch.int64)
    count = function("spgemm_check", "csr_multiplies", "lpppp", "l")
    total_ = count(
        A.shape[0], A.ptr.data_ptr(), A.col.data_ptr(), B.ptr.data_ptr(), each.data_ptr()
    )
    return each, int(total_)


def transposed(A: Csr) -> tuple[Csr, Tensor]:
    """A by columns: its transpose in rows, and for each entry the place that it has in A."""
    places = torch.arange(A.nnz, dtype=torch.int64)
    turned = A.with_values(places).scipy().tocsc()
    order = torch.from_numpy(turned.data)
    shape = (A.shape[1], A.shape[0])
    ptr = torch.from_numpy(turned.indptr).to(torch.int64)
    col = torch.from_numpy(turned.indices).to(torch.int32)
    return Csr(shape, ptr, col, A.val[order]), order


def _shape(name: str, shape: Any) -> tuple[int, int]:
    require(
        len(shape) == 2,
        f"kernel.spgemm {name}",
        f"shape {list(shape)}",
        expected="a matrix, of two dimensions",
        error=KernelError,
    )
    require(
        max(shape) <= _MAX_COLUMNS,
        f"kernel.spgemm {name}",
        f"shape {list(shape)}",
        expected=f"at most {_MAX_COLUMNS} rows and columns",
        error=KernelError,
    )
    return int(shape[0]), int(shape[1])


def _shared(array: np.ndarray) -> Tensor:
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _narrow(name: str, columns: Tensor, shape: Any) -> Tensor:
    """Columns in 32 bits, after a look whether they fit."""
    if columns.dtype == torch.int32:
        return columns.contiguous()
    if columns.dtype == torch.int64 and compiler() is not None:
        wide, narrow = columns.contiguous(), torch.empty(columns.shape, dtype=torch.int32)
        into = function("spgemm_check", "csr_narrow", "lpp", "l")
        if not into(wide.numel(), wide.data_ptr(), narrow.data_ptr()):
            return narrow
    if columns.numel():
        low, high = (int(end) for end in torch.aminmax(columns))
        if low < 0 or high >= shape[1]:
            raise KernelError(
                f"kernel.spgemm {name}: column {low if low < 0 else high} of a matrix of shape "
                f"{list(shape)}; expected 0 to {shape[1] - 1}"
            )
    return columns.to(torch.int32)


def _check(name: str, matrix: Csr) -> None:
    """See :func:`from_any`."""
    row, kind = _first_bad(matrix)
    if row < 0:
        return
    what, remedy = _WHAT[kind]
    raise KernelError(
        f"kernel.spgemm {name}, row {row}: {what} (shape {list(matrix.shape)}, {matrix.nnz} "
        f"entries); {remedy}"
    )


def _first_bad(matrix: Csr) -> tuple[int, int]:
    rows, columns = matrix.shape
    if matrix.ptr.numel() != rows + 1 or matrix.val.numel() != matrix.nnz:
        return rows, 1
    if compiler() is not None:
        what = torch.zeros(1, dtype=torch.int64)
        check = function("spgemm_check", "csr_check", "lllppp", "l")
        ptr, col = matrix.ptr.data_ptr(), matrix.col.data_ptr()
        bad = check(rows, columns, matrix.nnz, ptr, col, what.data_ptr())
        return int(bad), int(what)
    return _first_bad_numpy(matrix.ptr.numpy(), matrix.col.numpy(), rows, columns)


def _first_bad_numpy(ptr: Any, col: Any, rows: int, columns: int) -> tuple[int, int]:
    if ptr[0] != 0 or ptr[-1] != col.size or (np.diff(ptr) < 0).any():
        return rows, 1
    row_of = np.repeat(np.arange(rows), np.diff(ptr))
    outside = (col < 0) | (col >= columns)
    if outside.any():
        return int(row_of[outside][0]), 2
    falls = (np.diff(col) < 0) & (np.diff(row_of) == 0)
    return (int(row_of[1:][falls][0]), 3) if falls.any() else (-1, 0)
