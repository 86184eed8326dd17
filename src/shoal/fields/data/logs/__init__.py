"""logs: the job that finds templates in logs, anomalies in their events, and packs them small.

Start reading at ``protocols.py``, then ``parsers/drain.py`` and ``formats.py``. The estimator of
scikit-learn's style, ``LogTemplates``, is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable, load_object

if TYPE_CHECKING:
    from shoal.fields.data.logs.estimators import LogTemplates
    from shoal.fields.data.logs.packed.container import pack, unpack
    from shoal.fields.data.logs.parsers.drain import DrainParser

__all__ = ["ANOMALY_DETECTORS", "LOG_PARSERS", "DrainParser", "LogTemplates", "pack", "unpack"]

LOG_PARSERS = PartTable(
    "log_parser",
    {
        "drain": "shoal.fields.data.logs.parsers.drain:DrainParser",
        "spell": "shoal.fields.data.logs.parsers.spell:SpellParser",
        "iplom": "shoal.fields.data.logs.parsers.iplom:IPLoM",
        "frequency_tree": "shoal.fields.data.logs.parsers.frequency_tree:FrequencyTree",
    },
    about="How templates are found. Chosen by the key `parser` of a job with `job: parse_logs`.",
    protocol="shoal.fields.data.logs.protocols:LogParser",
)

ANOMALY_DETECTORS = PartTable(
    "anomaly_detector",
    {
        "pca": "shoal.fields.data.logs.anomalies.pca:EventPCA",
        "invariants": "shoal.fields.data.logs.anomalies.invariants:InvariantMining",
        "clusters": "shoal.fields.data.logs.anomalies.clusters:EventClusters",
        "logistic": "shoal.fields.data.logs.anomalies.logistic:EventLogistic",
        "next_event": "shoal.fields.data.logs.anomalies.next_event:NextEvent",
    },
    about=(
        "How unusual sessions or windows of events are detected. Chosen by the key "
        "`anomalies` of a job with `job: parse_logs`."
    ),
    protocol="shoal.fields.data.logs.anomalies.protocols:AnomalyDetector",
)

_LAZY = {
    "LogTemplates": "shoal.fields.data.logs.estimators:LogTemplates",
    "DrainParser": "shoal.fields.data.logs.parsers.drain:DrainParser",
    "pack": "shoal.fields.data.logs.packed.container:pack",
    "unpack": "shoal.fields.data.logs.packed.container:unpack",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return load_object(_LAZY[name])
    raise AttributeError(f"module 'shoal.fields.data.logs' has no attribute {name!r}")
