"""plan.batching.cache: how cache blocks are managed."""
