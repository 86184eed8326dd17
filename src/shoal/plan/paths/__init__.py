"""paths: which way each flow takes through a fabric, one way a file.

``protocols`` says what a planner of paths promises, ``colouring`` is the theorem behind the
good ones, ``compare`` holds planners against each other.
"""

from shoal.core.parts import PartTable

__all__ = ["PATH_PLANNERS"]

PATH_PLANNERS = PartTable(
    "path_planner",
    {
        "ecmp": "shoal.plan.paths.ecmp:ECMP",
        "greedy": "shoal.plan.paths.greedy:GreedyPaths",
        "on_arrival": "shoal.plan.paths.on_arrival:OnArrival",
        "split": "shoal.plan.paths.split:SplitPaths",
        "spray": "shoal.plan.paths.spray:Spray",
        "lp": "shoal.plan.paths.lp:MinMaxLP",
        "c4p": "shoal.plan.paths.c4p:C4P",
    },
    about=("How flows are routed through a fabric. Chosen by `shoal explain paths --policy`."),
    protocol="shoal.plan.paths.protocols:PathPlanner",
)
