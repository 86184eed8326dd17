"""datastore: passages of text files that are searched once and sampled afterwards.

Start reading at ``protocols.py``, then ``passages.py``, ``lists.py`` and ``sweep.py``.
:class:`Datastore` is what a program opens and asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable, load_object

if TYPE_CHECKING:
    from shoal.fields.retrieve.datastore.building import build_datastore, index_passages
    from shoal.fields.retrieve.datastore.protocols import RetrievalOptions
    from shoal.fields.retrieve.datastore.store import Datastore
    from shoal.fields.retrieve.datastore.sweep import StoreSweep

__all__ = [
    "PASSAGE_INDEXES",
    "Datastore",
    "RetrievalOptions",
    "StoreSweep",
    "build_datastore",
    "index_passages",
]

PASSAGE_INDEXES = PartTable(
    "passage_index",
    {
        "bm25": "shoal.fields.retrieve.datastore.bm25:WordPostings",
        "dense": "shoal.fields.retrieve.datastore.dense:PassageVectors",
    },
    about=(
        "How the passages of a shard are found. Chosen by the key `method` of a job with "
        "`job: datastore`."
    ),
    protocol="shoal.fields.retrieve.datastore.protocols:PassageIndex",
)

_PLACES = {
    "Datastore": "store",
    "RetrievalOptions": "protocols",
    "StoreSweep": "sweep",
    "build_datastore": "building",
    "index_passages": "building",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return load_object(f"shoal.fields.retrieve.datastore.{_PLACES[name]}:{name}")
    raise AttributeError(f"module 'shoal.fields.retrieve.datastore' has no attribute {name!r}")
