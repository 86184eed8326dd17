"""mine: the job that finds sets of items which occur together, and rules among them.

Start reading at ``protocols.py``, then ``miners/eclat.py``. The estimator of scikit-learn's style,
``FrequentItemsets``, the generator ``heaton_baskets`` and ``choose_miner``, the planner's choice
for baskets in memory, are imported when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable, load_object

if TYPE_CHECKING:
    from shoal.fields.data.mine.estimators import FrequentItemsets
    from shoal.fields.data.mine.generator import heaton_baskets
    from shoal.fields.data.mine.planning import choose_miner

__all__ = ["MINERS", "FrequentItemsets", "choose_miner", "heaton_baskets"]

MINERS = PartTable(
    "miner",
    {
        "apriori": "shoal.fields.data.mine.miners.apriori:Apriori",
        "eclat": "shoal.fields.data.mine.miners.eclat:Eclat",
        "fpgrowth": "shoal.fields.data.mine.miners.fpgrowth:FPGrowth",
    },
    about="How frequent sets are found. Chosen by the key `method` of a job with `job: mine`.",
    protocol="shoal.fields.data.mine.protocols:Miner",
)

_LAZY = {
    "FrequentItemsets": "estimators",
    "choose_miner": "planning",
    "heaton_baskets": "generator",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return load_object(f"shoal.fields.data.mine.{_LAZY[name]}:{name}")
    raise AttributeError(f"module 'shoal.fields.data.mine' has no attribute {name!r}")
