"""serve.decode: how tokens are decoded where it is not one after the other. Torch-free.

The door, with the table of the ways to decode and of the layouts of concurrent workers.
"""

from shoal.core.parts import PartTable

__all__ = ["DECODES", "HOGWILD_LAYOUTS"]

DECODES = PartTable(
    "decode",
    {
        "autoregressive": "shoal.serve.decode.autoregressive:Autoregressive",
        "hogwild": "shoal.serve.decode.hogwild.part:Hogwild",
    },
)

HOGWILD_LAYOUTS = PartTable(
    "hogwild_layout",
    {
        "contiguous": "shoal.serve.decode.hogwild.contiguous:Contiguous",
        "interleaved": "shoal.serve.decode.hogwild.interleaved:Interleaved",
        "combined": "shoal.serve.decode.hogwild.combined:Combined",
    },
)
