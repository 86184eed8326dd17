"""prepare: the job that profiles a table, says which steps it needs and why, and makes them.

Start reading at ``protocols.py``, then ``steps/impute.py``. ``PrepPipeline``, for tables in memory,
and ``guide_table``, which proposes its steps, are imported when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable, load_object

if TYPE_CHECKING:
    from shoal.fields.data.prepare.guide import guide_table
    from shoal.fields.data.prepare.pipeline import PrepPipeline

__all__ = ["PREPARATIONS", "PrepPipeline", "guide_table"]

_STEPS = "shoal.fields.data.prepare.steps"
# In the order in which the guide proposes them.
PREPARATIONS = PartTable(
    "preparation",
    {
        "drop_columns": f"{_STEPS}.drop_columns:DropColumns",
        "types": f"{_STEPS}.types:Types",
        "drop_missing": f"{_STEPS}.drop_missing:DropMissing",
        "reservoir": f"{_STEPS}.reservoir:Reservoir",
        "stratified": f"{_STEPS}.stratified:Stratified",
        "outliers": f"{_STEPS}.outliers:Outliers",
        "impute": f"{_STEPS}.impute:Impute",
        "target_encode": f"{_STEPS}.target_encode:TargetEncode",
        "one_hot": f"{_STEPS}.one_hot:OneHot",
        "hash_encode": f"{_STEPS}.hash_encode:HashEncode",
        "scale": f"{_STEPS}.scale:Scale",
        "pca": f"{_STEPS}.pca:PCA",
        "random_projection": f"{_STEPS}.random_projection:RandomProjection",
        "k_anonymity": f"{_STEPS}.k_anonymity:KAnonymity",
        "noised_aggregates": f"{_STEPS}.noised_aggregates:NoisedAggregates",
    },
    about=(
        "A step of preparing a table. Chosen by the key `steps` of a job with `job: prepare`; the "
        "guide, `shoal plan prepare`, proposes them."
    ),
    protocol="shoal.fields.data.prepare.protocols:Preparation",
)

_LAZY = {"PrepPipeline": "pipeline", "guide_table": "guide"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return load_object(f"shoal.fields.data.prepare.{_LAZY[name]}:{name}")
    raise AttributeError(f"module 'shoal.fields.data.prepare' has no attribute {name!r}")
