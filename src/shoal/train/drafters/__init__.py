"""Training what drafts for a model: a job with ``job: drafter``.

The table of its parts. ``run.execute`` is the run; ``texts`` and ``features`` are what
all kinds of drafter read, ``calibrate`` says how often their guesses are right.
"""

from shoal.core.parts import PartTable

__all__ = ["DRAFTERS"]

DRAFTERS = PartTable(
    "drafter",
    {
        "medusa": "shoal.train.drafters.medusa:MedusaTraining",
        "falcon": "shoal.train.drafters.falcon:FalconTraining",
        "ppd": "shoal.train.drafters.ppd:PpdTraining",
        "dovetail": "shoal.train.drafters.dovetail:DovetailTraining",
    },
    about=(
        "The kind of draft model to train. Chosen by the key `drafter` of a job "
        "with `job: drafter`."
    ),
    protocol="shoal.train.drafters.protocols:DrafterPart",
)
