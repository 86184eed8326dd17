"""kernel: operators, each with a reference that says what it means and kernels that are fast.

The door: the tables of kernels, of weight formats and of cache formats. A kernel is called
``OPERATOR.BACKEND``; which of them computes a call is a question of cost
(:mod:`shoal.kernel.dispatch`).
"""

from shoal.core.parts import PartTable

__all__ = ["KERNELS", "KV_FORMATS", "WEIGHT_FORMATS"]

KERNELS = PartTable(
    "kernel",
    {
        "linear.reference": "shoal.kernel.linear.reference:Reference",
        "linear.torch": "shoal.kernel.linear.library:Library",
        "linear.cpp": "shoal.kernel.linear.cpp:Cpp",
        "linear_lowbit.reference": "shoal.kernel.lowbit.reference:Reference",
    },
)

WEIGHT_FORMATS = PartTable(
    "weight_format",
    {
        "int": "shoal.kernel.formats.integer:Int",
        "uint": "shoal.kernel.formats.affine:Uint",
        "float": "shoal.kernel.formats.floating:Float",
        "bipolar": "shoal.kernel.formats.bipolar:Bipolar",
        "bfp": "shoal.kernel.formats.bfp:Bfp",
    },
)

KV_FORMATS = PartTable(
    "kv_format",
    {},
)
