"""plan.sbp: which placement every tensor of a graph takes."""
