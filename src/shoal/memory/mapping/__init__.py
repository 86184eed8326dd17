"""mapping: which buffer of a program is in fast memory when, and at which address.

The game and the solvers that need no torch are in ``shoal.plan.mapping``; here are the agent that
learns (``muzero``, ``hybrid``), real models as programs (``trace``, ``samples``) and what runs a
program in two real memories (``executor``).
"""

from shoal.core.parts import PartTable

__all__ = ["MAPPERS"]

MAPPERS = PartTable(
    "mapper",
    {
        "greedy": "shoal.plan.mapping.greedy:GreedyMapper",
        "milp": "shoal.plan.mapping.milp:Milp",
        "anneal": "shoal.plan.mapping.anneal:Anneal",
        "muzero": "shoal.memory.mapping.muzero:MuZero",
        "hybrid": "shoal.memory.mapping.hybrid:HybridMapper",
    },
    about=(
        "When each buffer is in fast memory, and at which address. Chosen by `shoal explain "
        "mapping --mapper`."
    ),
    protocol="shoal.plan.mapping.protocols:Mapper",
)
