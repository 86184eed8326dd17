"""plan.strategy: planners of training jobs.

The table of planners. ``protocols`` says what a planner promises.
"""

from shoal.core.parts import PartTable

__all__ = ["PLANNERS"]

PLANNERS = PartTable(
    "planner",
    {
        "search": "shoal.plan.strategy.search:SearchPlanner",
        "rules": "shoal.plan.strategy.rules:RulesPlanner",
        "galvatron": "shoal.plan.strategy.galvatron:Galvatron",
        "megatron": "shoal.plan.strategy.megatron:MegatronPlanner",
    },
    about="How plans are searched. Chosen by `shoal plan train --planner`.",
    protocol="shoal.plan.strategy.protocols:Planner",
)
