"""cluster: the job that groups objects, around medoids or centres, and the methods that do.

Start reading at ``protocols.py``, then ``fasterpam.py`` and ``ppp/``. The estimators of
scikit-learn's style, ``KMedoids``, ``FasterCLARA``, ``FasterCLARANS`` and ``PPP``, are imported
when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable, load_object

if TYPE_CHECKING:
    from shoal.fields.data.cluster.estimators import FasterCLARA, FasterCLARANS, KMedoids
    from shoal.fields.data.cluster.ppp.estimator import PPP

__all__ = ["CLUSTERERS", "PPP", "FasterCLARA", "FasterCLARANS", "KMedoids"]

CLUSTERERS = PartTable(
    "clusterer",
    {
        "fasterpam": "shoal.fields.data.cluster.fasterpam:FasterPAM",
        "fastpam1": "shoal.fields.data.cluster.fastpam1:FastPAM1",
        "pam": "shoal.fields.data.cluster.pam:PAM",
        "alternating": "shoal.fields.data.cluster.alternating:Alternating",
        "clara": "shoal.fields.data.cluster.clara:CLARA",
        "clarans": "shoal.fields.data.cluster.clarans:CLARANS",
        "ppp": "shoal.fields.data.cluster.ppp.method:PartitivePartitioning",
    },
    about="How clusters are found. Chosen by the key `method` of a job with `job: cluster`.",
    protocol="shoal.fields.data.cluster.protocols:Clusterer",
)


def __getattr__(name: str) -> Any:
    if name == "PPP":
        return load_object(f"shoal.fields.data.cluster.ppp.estimator:{name}")
    if name in __all__:
        return load_object(f"shoal.fields.data.cluster.estimators:{name}")
    raise AttributeError(f"module 'shoal.fields.data.cluster' has no attribute {name!r}")
