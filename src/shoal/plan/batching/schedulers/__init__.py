"""plan.batching.schedulers: who runs in the next step."""
