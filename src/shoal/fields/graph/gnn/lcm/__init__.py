"""lcm: neighbours folded in a balanced tree by a learned commutative operator."""
