"""A kind of job in a package of its own: sort numbers."""
