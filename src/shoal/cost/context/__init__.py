"""cost.context: ways to share a sequence, and what each puts on the wire."""
