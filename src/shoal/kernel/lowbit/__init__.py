"""``linear_lowbit``: products with weights that are stored in few bits."""
