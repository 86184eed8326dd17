"""privacy: what the model and the server may learn of a single client."""

from shoal.core.parts import PartTable

__all__ = ["PRIVACY"]

PRIVACY = PartTable(
    "privacy",
    {
        "dp": "shoal.fields.federate.privacy.dp:DifferentialPrivacy",
    },
    about=(
        "What the model may reveal of a single client, and what that costs. Chosen by the key "
        "`privacy` of a federated job."
    ),
    protocol="shoal.fields.federate.privacy.protocols:Privacy",
)
