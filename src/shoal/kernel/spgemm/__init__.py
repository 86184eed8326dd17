"""Products of sparse matrices: the operator ``spgemm`` and its kernels.

:func:`spgemm` multiplies two matrices in rows (CSR), of SciPy or of PyTorch, over a semiring.
"""

from shoal.kernel.spgemm.product import spgemm

__all__ = ["spgemm"]
