"""run: the attention of the context-parallel parts; needs torch."""
