"""miners: the ways to find frequent sets, compiled, and what they cost."""
