"""grouped: each expert's matrix with its own rows, which lie by expert; forward and backward."""
