"""fastrp: powers of the transition matrix, applied to a very sparse random projection."""
