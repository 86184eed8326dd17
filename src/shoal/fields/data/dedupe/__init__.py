"""dedupe: the job that removes duplicate documents, and finds tables that others contain.

Start reading at ``protocols.py``, then ``minhash_lsh.py``.
"""

from shoal.core.parts import PartTable

__all__ = ["DEDUPERS"]

DEDUPERS = PartTable(
    "deduper",
    {
        "exact": "shoal.fields.data.dedupe.exact:ExactText",
        "minhash": "shoal.fields.data.dedupe.minhash_lsh:MinHashLSH",
        "containment": "shoal.fields.data.dedupe.containment:TableContainment",
    },
    about="How duplicates are found. Chosen by the key `method` of a job with `job: dedupe`.",
    protocol="shoal.fields.data.dedupe.protocols:Deduper",
)
