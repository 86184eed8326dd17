"""grank: ranking by the clicks of people who search alike, passed between peers without a server.

Start reading at ``protocols.py``, then ``entries.py``, ``log.py``, ``ranking.py`` and ``peer.py``.
:class:`GRank` ranks, :class:`Peer` takes part in a network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import PartTable, lazy_names

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

__getattr__ = lazy_names(__name__, GRank="ranking", Peer="peer")
