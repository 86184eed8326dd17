"""Acceptance rules: which guesses hold. Each is a part of kind ``accept``."""
