"""gather: rows of a table of features, from where they lie to where a network is trained."""
