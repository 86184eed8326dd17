"""plan.tune: search when pricing everything is too much, and failures cost a trial.

The table of tuners. ``protocols`` says what a tuner promises, ``training`` and
``serving`` what is tuned, ``repeats`` how often something is measured, ``shapley`` what made the
difference, ``landscape`` where the peaks are.
"""

from shoal.core.parts import PartTable

__all__ = ["TUNERS"]

TUNERS = PartTable(
    "tuner",
    {
        "bayes": "shoal.plan.tune.bayes:Bayes",
        "random": "shoal.plan.tune.random:Random",
        "halving": "shoal.plan.tune.halving:Halving",
        "exhaustive": "shoal.plan.tune.exhaustive:Exhaustive",
    },
    about=(
        "Which configurations are tried, and in which order. Chosen by `shoal explain "
        "tune --tuner`."
    ),
    protocol="shoal.plan.tune.protocols:Tuner",
)
