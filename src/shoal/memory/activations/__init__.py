"""memory.activations: what autograd saves, and who keeps it where."""
