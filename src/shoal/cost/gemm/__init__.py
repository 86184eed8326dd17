"""cost.gemm: matrix products, predicted by a forest that learned from measured ones."""
