"""search: collections of points behind HTTP, found by vectors, by words, or by both.

Start reading at ``protocols.py``, then ``served.py`` and ``api.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import PartTable, lazy_names

if TYPE_CHECKING:
    from shoal.fields.retrieve.search.library import Library
    from shoal.fields.retrieve.search.server import SearchOptions, running_search

__all__ = ["EMBEDDERS", "SEARCH_METHODS", "Library", "SearchOptions", "running_search"]

SEARCH_METHODS = PartTable(
    "search_method",
    {
        "dense": "shoal.fields.retrieve.search.dense:DenseVectors",
        "bm25": "shoal.fields.retrieve.search.lexical:Lexical",
        "hybrid": "shoal.fields.retrieve.search.hybrid:Hybrid",
    },
    about=(
        "How the points that answer a query are ranked. Chosen by the key `method` of a job with "
        "`job: search`, and by `using` in a request."
    ),
    protocol="shoal.fields.retrieve.search.protocols:SearchMethod",
)

EMBEDDERS = PartTable(
    "embedder",
    {
        "hashed_words": "shoal.fields.retrieve.search.hashed:HashedWords",
        "embeddings_api": "shoal.fields.retrieve.search.embeddings:EmbeddingsApi",
        "tower": "shoal.fields.retrieve.towers.embedder:TowerEmbedder",
    },
    about=(
        "How a text becomes a vector. Chosen by the key `embedder` of a job with `job: search`."
    ),
    protocol="shoal.fields.retrieve.search.protocols:TextEmbedder",
)

__getattr__ = lazy_names(
    __name__, Library="library", SearchOptions="server", running_search="server"
)
