"""Patterns: how the fragments of a parameter combine, one rule a file."""
