"""models: six generative models of sparse causes, one file each, and what they share."""
