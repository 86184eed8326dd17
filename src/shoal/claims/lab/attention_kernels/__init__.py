"""attention_kernels: softmax attention under any typed mask, one way a file.

The parts declare what they can do without torch; ``prepare`` brings what depends on the mask
alone into the form that a kernel wants, so that it is timed and counted apart from attention
itself.
"""

from shoal.core.parts import PartTable

__all__ = ["ATTENTION_KERNELS"]

ATTENTION_KERNELS = PartTable(
    "attention_kernel",
    {
        "naive": "shoal.claims.lab.attention_kernels.naive:Naive",
        "sdpa": "shoal.claims.lab.attention_kernels.sdpa:SDPA",
        "flash_cpu": "shoal.claims.lab.attention_kernels.flash_cpu:FlashCPU",
        "flex": "shoal.claims.lab.attention_kernels.flex:Flex",
        "tiled": "shoal.claims.lab.attention_kernels.tiled:Tiled",
        "varlen": "shoal.claims.lab.attention_kernels.varlen:Varlen",
        "chunked": "shoal.claims.lab.attention_kernels.chunked:Chunked",
    },
    about=("How masked attention is computed on one device. Compared by `shoal bench attention`."),
    protocol="shoal.claims.lab.attention_kernels.protocols:AttentionKernelPart",
)
