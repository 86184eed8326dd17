"""plan.batching.cache: who holds which block of the cache."""
