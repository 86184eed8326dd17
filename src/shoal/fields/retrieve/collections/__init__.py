"""collections: points that are added, changed, removed and searched, and outlive a crash.

Start reading at ``collection.py``, then ``wal.py`` and ``filters.py``.
"""

from shoal.fields.retrieve.collections.collection import Collection
from shoal.fields.retrieve.collections.filters import PointFilter
from shoal.fields.retrieve.collections.points import Point, ScoredPoint

__all__ = ["Collection", "Point", "PointFilter", "ScoredPoint"]
