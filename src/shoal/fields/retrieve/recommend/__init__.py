"""recommend: the job that learns what users do next, and the recommenders that it compares.

Start reading at ``protocols.py``, then ``hstu.py`` and ``networks.py``. :class:`HSTURanker` ranks
candidates by the action that a user would take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import PartTable, lazy_names

if TYPE_CHECKING:
    from shoal.fields.retrieve.recommend.events import drawn_streams, read_events
    from shoal.fields.retrieve.recommend.ranker import HSTURanker

__all__ = ["RECOMMENDERS", "HSTURanker", "drawn_streams", "read_events"]

RECOMMENDERS = PartTable(
    "recommender",
    {
        "hstu": "shoal.fields.retrieve.recommend.hstu:HSTURecommender",
        "sasrec": "shoal.fields.retrieve.recommend.sasrec:SASRec",
        "popular": "shoal.fields.retrieve.recommend.popular:PopularItems",
    },
    about=(
        "How the next item of a user is chosen. Chosen by the key `method` of a job with "
        "`job: recommend`."
    ),
    protocol="shoal.fields.retrieve.recommend.protocols:Recommender",
)

__getattr__ = lazy_names(
    __name__, HSTURanker="ranker", drawn_streams="events", read_events="events"
)
