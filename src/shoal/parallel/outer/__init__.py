"""How often data-parallel workers synchronize: every step, or once per round of steps.

A part of kind ``sync``, each in a file of its own. ``averaging`` has what the parts with rounds
share, ``rounds`` their runtime, ``rule`` where it keeps what, ``reference`` the workers of a run
one after the other in one process: what a run must equal bit for bit.
"""
