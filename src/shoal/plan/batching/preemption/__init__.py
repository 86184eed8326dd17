"""plan.batching.preemption: how a request gives way."""
