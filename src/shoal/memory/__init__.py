"""memory: state that does not fit: tiers, what moves between them, and who streams what.

- ``tier``: a place of so many bytes: budgeted memory of a device or a host.
- ``device``: what a computation keeps alive, counted against the device's budget.
- ``disk``: a place in a file, past the system's cache of pages.
- ``mover``: copies from one place to another, each way with a thread of its own.
- ``tiers``: the places of one run and the ways between them.
- ``stream``: parameters come to the device when they are needed, and gradients leave it.
- ``subgroups``: the update of what lies in slow tiers.
"""

from shoal.core.parts import PartTable

__all__ = ["OFFLOADS"]

OFFLOADS = PartTable(
    "offload",
    {
        "zero_infinity": "shoal.memory.zero_infinity:ZeroInfinity",
        "deep_optimizer_states": "shoal.memory.deep_optimizer_states:DeepOptimizerStates",
    },
)
