"""planes: who receives the bodies of updates, and who sums them."""

from shoal.core.parts import PartTable

__all__ = ["AGGREGATION_PLANES"]

AGGREGATION_PLANES = PartTable(
    "aggregation_plane",
    {
        "direct": "shoal.fields.federate.planes.direct:Direct",
        "broker": "shoal.fields.federate.planes.broker:Broker",
        "lifl": "shoal.fields.federate.lifl.plane:Lifl",
    },
    about=(
        "Who receives the bodies of updates, and who sums them. Chosen by the key `plane` of a "
        "federated job."
    ),
    protocol="shoal.fields.federate.planes.protocols:AggregationPlane",
)
