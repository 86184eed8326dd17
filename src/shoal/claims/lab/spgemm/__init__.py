"""spgemm: products of sparse matrices of SciPy or PyTorch, with gradients.

:func:`spgemm` multiplies two matrices in rows (CSR) over a semiring, by the kernels of
:mod:`shoal.kernel.spgemm`.
"""

from shoal.claims.lab.spgemm.product import spgemm

__all__ = ["spgemm"]
