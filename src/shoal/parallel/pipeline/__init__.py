"""parallel.pipeline: stages of a model, and the runtimes that pass micro-batches along them."""
