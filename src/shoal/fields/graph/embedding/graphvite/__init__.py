"""graphvite: pairs of random walks, trained in blocks that share no rows."""
