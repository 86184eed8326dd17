"""plan.strategy: planners of training jobs.

The door: the table of planners. ``protocols`` says what a planner promises.
"""

from shoal.core.parts import PartTable

__all__ = ["PLANNERS"]

PLANNERS = PartTable(
    "planner",
    {
        "search": "shoal.plan.strategy.search:Search",
        "rules": "shoal.plan.strategy.rules:Rules",
        "galvatron": "shoal.plan.strategy.galvatron:Galvatron",
        "megatron": "shoal.plan.strategy.megatron:Megatron",
    },
    about="How plans are found. Chosen by `shoal plan train --planner`.",
    protocol="shoal.plan.strategy.protocols:Planner",
)
