"""robust: how the updates of an aggregation become one, where some may be wrong."""

from shoal.core.parts import PartTable

__all__ = ["ROBUST_RULES"]

ROBUST_RULES = PartTable(
    "robust_rule",
    {
        "mean": "shoal.fields.federate.aggregate.mean:Mean",
        "median": "shoal.fields.federate.robust.median:Median",
        "trimmed_mean": "shoal.fields.federate.robust.trimmed_mean:TrimmedMean",
        "krum": "shoal.fields.federate.robust.krum:Krum",
        "multi_krum": "shoal.fields.federate.robust.multi_krum:MultiKrum",
        "bulyan": "shoal.fields.federate.robust.bulyan:Bulyan",
        "geometric_median": "shoal.fields.federate.robust.geometric_median:GeometricMedian",
        "flag": "shoal.fields.federate.robust.flag:FlagAggregator",
    },
    about=(
        "How the updates of an aggregation become one, where some may be wrong. Chosen by the key "
        "`robust` of a federated job."
    ),
    protocol="shoal.fields.federate.protocols:RobustRule",
)
