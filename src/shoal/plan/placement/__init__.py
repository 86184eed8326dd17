"""placement: which devices hold which experts, one way a file. Torch-free.

``protocols`` says what a placer promises, ``routing`` sends tokens to the copies that it has made,
``replay`` asks what a recorded routing would have cost.
"""

from shoal.core.parts import PartTable

__all__ = ["PLACERS"]

PLACERS = PartTable(
    "placer",
    {
        "owners": "shoal.plan.placement.owners:Owners",
        "fssdp": "shoal.plan.placement.fssdp:FSSDP",
    },
    about=(
        "Which expert-parallel ranks hold copies of popular experts in a step. Chosen by "
        "the key `parallel.placer` of a job."
    ),
    protocol="shoal.plan.placement.protocols:ExpertPlacer",
)
