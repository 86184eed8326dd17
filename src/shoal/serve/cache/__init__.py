"""serve.cache: where keys, values and weights lie, and attention over them."""
