"""osq: vectors and attributes as scalar codes in shared bit segments, searched in stages."""
