"""Acceptance rules: how draft tokens are accepted. Each is a part of kind ``accept``."""
