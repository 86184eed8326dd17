"""compress: updates in fewer bytes."""

from shoal.core.parts import PartTable

__all__ = ["UPDATE_COMPRESSORS"]

UPDATE_COMPRESSORS = PartTable(
    "update_compressor",
    {
        "identity": "shoal.fields.federate.compress.identity:Identity",
        "rand_k": "shoal.fields.federate.compress.rand_k:RandK",
        "top_k": "shoal.fields.federate.compress.top_k:TopK",
        "natural": "shoal.fields.federate.compress.natural:NaturalRounding",
        "dithering": "shoal.fields.federate.compress.dithering:Dithering",
        "blocks8": "shoal.fields.federate.compress.blocks8:Blocks8",
        "power_sgd": "shoal.fields.federate.compress.power_sgd:PowerSgd",
    },
    about="How clients compress their updates. Chosen by the key `compressor` of a federated job.",
    protocol="shoal.fields.federate.protocols:UpdateCompressor",
)
