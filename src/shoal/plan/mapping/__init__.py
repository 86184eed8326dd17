"""mapping: which buffer is in fast memory when, and where; a game, its rules and its solvers.

``program`` is what runs, ``layout`` the answer and what holds it to account, ``game`` the rules.
Solvers that need no torch are here; the table of all of them is in ``shoal.memory.mapping``.
"""
