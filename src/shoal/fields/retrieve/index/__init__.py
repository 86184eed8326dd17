"""index: the job that indexes vectors, and the indexes that it compares.

Start reading at ``protocols.py``, then ``flat.py`` and ``curator/``. :class:`CuratorIndex` is the
index of many tenants, :class:`OSQIndex` that of attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import PartTable, lazy_names

if TYPE_CHECKING:
    from shoal.fields.retrieve.index.curator.index import CuratorIndex
    from shoal.fields.retrieve.index.curator.tenants import parse_tenants
    from shoal.fields.retrieve.index.inputs import write_dataset
    from shoal.fields.retrieve.index.osq.index import OSQIndex

__all__ = ["VECTOR_INDEXES", "CuratorIndex", "OSQIndex", "parse_tenants", "write_dataset"]

VECTOR_INDEXES = PartTable(
    "vector_index",
    {
        "flat": "shoal.fields.retrieve.index.flat:Flat",
        "ivf_flat": "shoal.fields.retrieve.index.ivf_flat:IvfFlat",
        "ivf_pq": "shoal.fields.retrieve.index.ivf_pq:IvfPq",
        "hnsw": "shoal.fields.retrieve.index.hnsw:Hnsw",
        "curator": "shoal.fields.retrieve.index.curator.part:SharedTree",
        "osq": "shoal.fields.retrieve.index.osq.part:ScalarSegments",
    },
    about=(
        "How the nearest vectors are found. Chosen by the key `method` of a job with `job: index`."
    ),
    protocol="shoal.fields.retrieve.index.protocols:VectorIndex",
)

__getattr__ = lazy_names(
    __name__,
    CuratorIndex="curator.index",
    OSQIndex="osq.index",
    parse_tenants="curator.tenants",
    write_dataset="inputs",
)
