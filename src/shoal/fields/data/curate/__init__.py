"""curate: the job that chooses the rows of a data set which a model should see.

Start reading at ``protocols.py``, then ``random_rows.py``, the method that the others are compared
with.
"""

from shoal.core.parts import PartTable

__all__ = ["CURATORS"]

CURATORS = PartTable(
    "curator",
    {
        "random": "shoal.fields.data.curate.random_rows:RandomRows",
        "filters": "shoal.fields.data.filters.method:FilteredRows",
        "prune": "shoal.fields.data.prune.rows:PruneRows",
        "projektor": "shoal.fields.data.curate.projektor.rows:ProjektorRows",
        "qqt": "shoal.fields.data.curate.qqt.rows:QQTRows",
    },
    about="How rows are chosen. Chosen by the key `method` of a job with `job: curate`.",
    protocol="shoal.fields.data.curate.protocols:Curator",
)
