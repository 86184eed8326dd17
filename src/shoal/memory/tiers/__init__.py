"""memory.tiers: places with a budget of bytes, and what moves between them."""
