"""plan.experts: how mixtures of experts are laid out, cut and overlapped."""
