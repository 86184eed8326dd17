"""sparse_coding: the job that explains vectors by few of many causes, and its generative models.

Start reading at ``protocols.py``, then ``engine.py`` and ``models/bsc.py``. The estimators of
scikit-learn's style, ``BSC``, ``TSC``, ``DSC``, ``MCA``, ``MMCA`` and ``GSC``, are imported when
they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable, load_object

if TYPE_CHECKING:
    from shoal.fields.data.sparse_coding.estimators import BSC, DSC, GSC, MCA, MMCA, TSC

__all__ = ["BSC", "DSC", "GSC", "MCA", "MMCA", "SUPERPOSITIONS", "TSC"]

SUPERPOSITIONS = PartTable(
    "superposition",
    {
        "bsc": "shoal.fields.data.sparse_coding.models.bsc:BinaryCauses",
        "tsc": "shoal.fields.data.sparse_coding.models.tsc:TernaryCauses",
        "dsc": "shoal.fields.data.sparse_coding.models.dsc:DiscreteCauses",
        "mca": "shoal.fields.data.sparse_coding.models.mca:MaximalCauses",
        "mmca": "shoal.fields.data.sparse_coding.models.mmca:MaximalMagnitudeCauses",
        "gsc": "shoal.fields.data.sparse_coding.models.gsc:SpikeAndSlabCauses",
    },
    about=(
        "A generative model of sparse causes: their prior, how they are combined, the noise. "
        "Chosen by the key `method` of a job with `job: sparse_code`."
    ),
    protocol="shoal.fields.data.sparse_coding.protocols:Superposition",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return load_object(f"shoal.fields.data.sparse_coding.estimators:{name}")
    raise AttributeError(f"module 'shoal.fields.data.sparse_coding' has no attribute {name!r}")
