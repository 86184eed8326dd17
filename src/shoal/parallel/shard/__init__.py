"""Sharding parts: what each data-parallel rank holds."""
