"""plan.trees: which guesses a step of speculative decoding verifies, and how many. Torch-free.

The table of tree shapes. What they are built from is in :mod:`shoal.ir.decoding`; how
many of a tree's nodes pay on this machine is
:class:`~shoal.plan.trees.drafting.ProfitableDrafting`'s choice.
"""

from shoal.core.parts import PartTable

__all__ = ["TREES"]

TREES = PartTable(
    "tree",
    {
        "auto": "shoal.plan.trees.auto:AutoTree",
        "chain": "shoal.plan.trees.chain:ChainTree",
        "cartesian": "shoal.plan.trees.cartesian:Cartesian",
        "hardware": "shoal.plan.trees.hardware:Hardware",
        "paths": "shoal.plan.trees.paths:PathTree",
    },
    about=(
        "Shape of the draft tree. Chosen by `tree` of a part of kind [speculative](#speculative)."
    ),
    protocol="shoal.ir.decoding:TreePart",
)
