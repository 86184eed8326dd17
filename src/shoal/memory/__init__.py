"""memory: state that does not fit: tiers, what moves between them, and who streams what.

- ``tier``: a place of so many bytes: budgeted memory of a device or a host.
- ``device``: what a computation keeps alive, counted against the device's budget.
- ``disk``: a place in a file, past the system's cache of pages.
- ``mover``: copies from one place to another, each way with a thread of its own.
"""
