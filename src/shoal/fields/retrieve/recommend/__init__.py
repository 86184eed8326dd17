"""recommend: the job that learns what users do next, and the recommenders that it compares.

Start reading at ``protocols.py``, then ``hstu.py`` and ``networks.py``. :class:`HSTURanker` ranks
candidates by the action that a user would take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable, load_object

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

_PLACES = {"HSTURanker": "ranker", "drawn_streams": "events", "read_events": "events"}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return load_object(f"shoal.fields.retrieve.recommend.{_PLACES[name]}:{name}")
    raise AttributeError(f"module 'shoal.fields.retrieve.recommend' has no attribute {name!r}")
