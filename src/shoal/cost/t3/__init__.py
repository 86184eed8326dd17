"""cost.t3: products that trigger their own reduce-scatter."""
