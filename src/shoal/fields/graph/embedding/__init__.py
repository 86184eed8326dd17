"""embedding: the job that makes vectors of nodes, and the ways that it compares."""
