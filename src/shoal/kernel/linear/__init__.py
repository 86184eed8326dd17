"""linear: the product of a few rows with a weight matrix, fp32 and bf16."""
