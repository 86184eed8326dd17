"""plan.tune: search when pricing everything is too much, and failures cost a trial.

The door: the table of tuners. ``protocols`` says what a tuner promises, ``training`` what is
tuned, ``shapley`` what made the difference.
"""

from shoal.core.parts import PartTable

__all__ = ["TUNERS"]

TUNERS = PartTable(
    "tuner",
    {
        "bayes": "shoal.plan.tune.bayes:Bayes",
        "random": "shoal.plan.tune.random:Random",
        "exhaustive": "shoal.plan.tune.exhaustive:Exhaustive",
    },
)
