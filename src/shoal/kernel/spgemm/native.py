"""What the C++ kernels of ``spgemm`` are given, and memory for results of unknown size."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shoal.kernel.native
from shoal.core.native import build
from shoal.kernel.pages import mapped, until_gone
from shoal.kernel.spgemm.call import VALUE_BYTES
from shoal.kernel.spgemm.csr import Counters, Csr, dtype_name

_COUNTERS = 10
# Each product is rounded before it is added: the same bits in a dense range and in a table.
_FLAGS = (*shoal.kernel.native.FLAGS, "-ffp-contract=off")
_SEMIRINGS = {
    "plus_times": "PlusTimes<{}>",
    "min_plus": "MinPlus<{}>",
    "or_and": "OrAnd",
    "pattern": "Pattern",
}
_TYPES = {"fp64": "double", "fp32": "float", "int64": "int64_t"}
_SMALL = 1 << 20


def threads() -> int:
    """Threads of a kernel: PyTorch's."""
    return torch.get_num_threads()


def cache_budget() -> int:
    """Three quarters of a core's own second cache, in bytes; of 1 MiB where it is unknown."""
    name = "SC_LEVEL2_CACHE_SIZE"
    size = os.sysconf(name) if name in os.sysconf_names else 0
    return 3 * (size if size > 0 else 1 << 20) // 4


def job(
    A: Csr,
    B: Csr,
    *,
    multiplies_M: Tensor,
    ptr_M: Tensor,
    col: int,
    val: int,
    counts: Tensor,
    mask: Csr | None = None,
    alpha: Tensor | None = None,
    version: int = 3,
    sort: bool = True,
    budget: int = 0,
    dense_ratio: int = 0,
    exact: bool = False,
    keep: bool = False,
) -> Any:
    """The struct Job of native/spgemm_job.h; what it points to must outlive the call."""
    fields = (
        A.shape[0],
        B.shape[1],
        *(tensor.data_ptr() for tensor in (A.ptr, A.col, A.val)),
        *(tensor.data_ptr() for tensor in (B.ptr, B.col, B.val)),
        0 if mask is None else mask.ptr.data_ptr(),
        0 if mask is None else mask.col.data_ptr(),
        multiplies_M.data_ptr(),
        0 if alpha is None else alpha.data_ptr(),
        ptr_M.data_ptr(),
        col,
        val,
        version,
        int(sort),
        threads(),
        budget,
        dense_ratio,
        int(exact),
        int(keep),
        counts.data_ptr(),
    )
    return (ctypes.c_int64 * len(fields))(*fields)


def no_counts() -> Tensor:
    """Counters before a product."""
    return torch.zeros(_COUNTERS, dtype=torch.int64)


def counters(counts: Tensor, A: Csr, B: Csr, nnz: int, multiplies: int) -> Counters:
    """What the C++ kernel counted, with the bytes that follow from it."""
    _, probes, hashed, dense, hash_rows, pieces, repeated, table, slowest, windows = counts.tolist()
    entry = 4 + VALUE_BYTES[dtype_name(A.val.dtype)]
    return Counters(
        multiplies=multiplies,
        table_bytes=table,
        probes=probes / hashed if hashed else 0.0,
        dense_rows=dense,
        hash_rows=hash_rows,
        pieces=pieces,
        repeated_rows=repeated,
        windows=windows,
        imbalance=slowest * threads() / multiplies if multiplies else 1.0,
        a_bytes=A.nnz * entry + 8 * (A.shape[0] + 1),
        b_bytes=multiplies * entry + 16 * A.nnz,
        c_bytes=nnz * entry + 8 * (A.shape[0] + 1),
    )


@functools.cache
def product(semiring: str, dtype: str) -> Any:
    """The hashed product of one semiring and type, built by itself: that is all a user waits for.

    ``semiring`` may be ``pattern``: only where entries are.
    """
    place = Path(shoal.kernel.native.__file__).parent
    header, job_ = ((place / name).read_text("utf-8") for name in ("spgemm.h", "spgemm_job.h"))
    name = _SEMIRINGS[semiring].format(_TYPES.get(dtype))
    text = header.replace('#include "spgemm_job.h"', job_) + (
        f'extern "C" int64_t product(const Job* job) {{ return spgemm<{name}>(job); }}\n'
    )
    made = build(text, name=f"kernel-spgemm-{semiring}-{dtype}", flags=_FLAGS)
    run = made.product
    run.argtypes, run.restype = [ctypes.c_void_p], ctypes.c_int64
    return run


class Pages:
    """A lazily allocated buffer for a limited number of elements.

    Memory of large results that are gone serves the next ones, until the system wants it back.

    Args:
        count: numbers at most.
        dtype: of them.

    Raises:
        OSError: the system does not promise so much.
    """

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.dtype, self.size = dtype, torch.empty(0, dtype=dtype).element_size()
        self.small: Tensor | None = None
        nbytes = count * self.size
        if nbytes <= _SMALL:
            self.small = torch.empty(max(1, count), dtype=dtype)
            self.address = self.small.data_ptr()
            return
        self.pages = mapped(nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))

    def tensor(self, count: int) -> Tensor:
        """The first numbers; the rest has taken no memory."""
        if self.small is not None:
            return self.small[:count].clone()
        if not count:
            return torch.empty(0, dtype=self.dtype)
        return torch.frombuffer(until_gone(self.pages), dtype=self.dtype, count=count)
