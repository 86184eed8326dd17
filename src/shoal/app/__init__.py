"""app: the command line. It has no logic of its own."""
