"""grank: ranking by the clicks of people who search alike, passed between peers without a server.

Start reading at ``protocols.py``, then ``entries.py``, ``log.py``, ``ranking.py`` and ``peer.py``.
:class:`GRank` ranks, :class:`Peer` takes part in a network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable, load_object

if TYPE_CHECKING:
    from shoal.fields.retrieve.grank.peer import Peer
    from shoal.fields.retrieve.grank.ranking import GRank

__all__ = ["RANKERS", "GRank", "Peer"]

RANKERS = PartTable(
    "ranker",
    {
        "grank": "shoal.fields.retrieve.grank.rankers:ClickRanker",
        "bm25": "shoal.fields.retrieve.grank.rankers:TextRanker",
        "popularity": "shoal.fields.retrieve.grank.rankers:PopularityRanker",
    },
    about=(
        "How a peer ranks documents for a query. Chosen by the key `method` of a job with "
        "`job: rank_peers`, and by `ranker` of `Peer`."
    ),
    protocol="shoal.fields.retrieve.grank.protocols:Ranker",
)

_PLACES = {"GRank": "ranking", "Peer": "peer"}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return load_object(f"shoal.fields.retrieve.grank.{_PLACES[name]}:{name}")
    raise AttributeError(f"module 'shoal.fields.retrieve.grank' has no attribute {name!r}")
