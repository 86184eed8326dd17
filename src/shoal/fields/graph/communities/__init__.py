"""communities: who belongs together in a large graph, by signatures of sets of neighbours.

Start reading at ``signature_graph.py``, then ``protocols.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import PartTable, lazy_names

if TYPE_CHECKING:
    from shoal.fields.graph.communities.adjacency import AdjacencySets
    from shoal.fields.graph.communities.signature_graph import SignatureGraph

__all__ = ["COMMUNITY_EXPANDERS", "AdjacencySets", "SignatureGraph"]

_HERE = "shoal.fields.graph.communities"

COMMUNITY_EXPANDERS = PartTable(
    "community_expander",
    {
        "mean_similarity": f"{_HERE}.mean_similarity:MeanSimilarity",
        "agglomerative": f"{_HERE}.agglomerative:Agglomerative",
        "pagerank": f"{_HERE}.pagerank:SimilarityPageRank",
    },
    about=(
        "How a few vertices become a community. Chosen by the key `method` of a job with "
        "`job: communities`."
    ),
    protocol=f"{_HERE}.protocols:CommunityExpander",
)

__getattr__ = lazy_names(__name__, AdjacencySets="adjacency", SignatureGraph="signature_graph")
