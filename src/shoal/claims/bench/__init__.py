"""bench: techniques of one kind against each other, in one harness with one report."""
