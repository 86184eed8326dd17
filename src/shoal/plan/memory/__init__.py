"""plan.memory: what to swap, compute again, keep on the host and save."""
