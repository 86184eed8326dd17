"""spgemm: kernels of products of sparse matrices in rows (CSR), over a semiring."""
