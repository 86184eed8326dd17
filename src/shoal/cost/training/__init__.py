"""cost.training: what a step of training costs, and what a rank then holds."""
