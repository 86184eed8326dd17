"""Patterns: how the fragments of a parameter combine."""
