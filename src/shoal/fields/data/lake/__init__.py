"""lake: tables whose rows all occur in another table, and which of them need not be kept.

Source: Shah et al., R2D2: Reducing Redundancy and Duplication in Data Lakes, 2023. Start reading at
``finder.py``. A job reaches it as the method ``containment`` of ``job: dedupe``.
"""

from shoal.fields.data.lake.finder import ContainmentFinder, Containments
from shoal.fields.data.lake.retention import RetentionPlan, RetentionPlanner
from shoal.fields.data.lake.tables import Lake, open_lake

__all__ = [
    "ContainmentFinder",
    "Containments",
    "Lake",
    "RetentionPlan",
    "RetentionPlanner",
    "open_lake",
]
