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
        "linear.amx": "shoal.kernel.linear.amx:Amx",
        "linear.triton": "shoal.kernel.linear.triton:Triton",
        "rms_norm.reference": "shoal.kernel.fused.reference:RmsNorm",
        "rms_norm.torch": "shoal.kernel.fused.library:RmsNorm",
        "rms_norm.cpp": "shoal.kernel.fused.cpp:RmsNorm",
        "rms_norm.triton": "shoal.kernel.fused.triton:RmsNorm",
        "rope.reference": "shoal.kernel.fused.reference:Rope",
        "rope.torch": "shoal.kernel.fused.library:Rope",
        "rope.cpp": "shoal.kernel.fused.cpp:Rope",
        "rope.triton": "shoal.kernel.fused.triton:Rope",
        "swiglu.reference": "shoal.kernel.fused.reference:Swiglu",
        "swiglu.torch": "shoal.kernel.fused.library:Swiglu",
        "swiglu.cpp": "shoal.kernel.fused.cpp:Swiglu",
        "swiglu.triton": "shoal.kernel.fused.triton:Swiglu",
        "sample.reference": "shoal.kernel.fused.reference:Sample",
        "sample.cpp": "shoal.kernel.fused.cpp:Sample",
        "sample.triton": "shoal.kernel.fused.triton:Sample",
        "linear_lowbit.reference": "shoal.kernel.lowbit.reference:Reference",
        "linear_lowbit.integer": "shoal.kernel.lowbit.marlin_cpu:Integer",
        "linear_lowbit.torch": "shoal.kernel.lowbit.peer:Library",
        "linear_lowbit.dequantised": "shoal.kernel.lowbit.peer:Dequantised",
        "linear_lowbit.cpp_w4a16": "shoal.kernel.lowbit.marlin_cpu:W4A16",
        "linear_lowbit.cpp_w4a8": "shoal.kernel.lowbit.marlin_cpu:W4A8",
        "linear_lowbit.triton": "shoal.kernel.lowbit.marlin_triton:Triton",
        "linear_lowbit.anybit": "shoal.kernel.lowbit.anybit:Anybit",
        "pack.reference": "shoal.kernel.strided.reference:ReferencePack",
        "pack.torch": "shoal.kernel.strided.library:LibraryPack",
        "pack.cpp": "shoal.kernel.strided.cpp:CppPack",
        "pack.triton": "shoal.kernel.strided.triton:TritonPack",
        "unpack.reference": "shoal.kernel.strided.reference:ReferenceUnpack",
        "unpack.torch": "shoal.kernel.strided.library:LibraryUnpack",
        "unpack.cpp": "shoal.kernel.strided.cpp:CppUnpack",
        "unpack.triton": "shoal.kernel.strided.triton:TritonUnpack",
        "paged_attention.reference": "shoal.kernel.paged.reference:Reference",
        "paged_attention.torch": "shoal.kernel.paged.library:Library",
        "paged_attention.cpp": "shoal.kernel.paged.cpp:Cpp",
        "paged_attention.amx": "shoal.kernel.paged.amx:Amx",
        "paged_attention.triton": "shoal.kernel.paged.triton:Triton",
        "recurrence.reference": "shoal.kernel.rnn.reference:Reference",
        "recurrence.alternating": "shoal.kernel.rnn.alternating:Alternating",
        "recurrence.fused": "shoal.kernel.rnn.fused:Fused",
        "recurrence.triton": "shoal.kernel.rnn.triton:Triton",
        "matmul_planes.reference": "shoal.kernel.planes.reference:Reference",
        "matmul_planes.cpp_popcnt": "shoal.kernel.planes.popcnt:Popcnt",
        "matmul_planes.cpp_gemv": "shoal.kernel.planes.gemv:Gemv",
        "matmul_planes.cpp_vnni": "shoal.kernel.planes.vnni:Vnni",
        "matmul_planes.cpp_amx": "shoal.kernel.planes.amx:Amx",
        "matmul_planes.triton": "shoal.kernel.planes.triton:Triton",
        "linear_lowbit.bipolar": "shoal.kernel.lowbit.bipolar:Bipolar",
        "grouped_linear.reference": "shoal.kernel.grouped.reference:Reference",
        "grouped_linear.loop": "shoal.kernel.grouped.loop:Loop",
        "grouped_linear.torch": "shoal.kernel.grouped.library:Library",
        "grouped_linear.padded": "shoal.kernel.grouped.padded:Padded",
        "grouped_linear.triton": "shoal.kernel.grouped.triton:Triton",
        "spgemm.reference": "shoal.kernel.spgemm.reference:Reference",
        "spgemm.inner": "shoal.kernel.spgemm.inner:Inner",
        "spgemm.outer": "shoal.kernel.spgemm.outer:Outer",
        "spgemm.scipy": "shoal.kernel.spgemm.peer:Peer",
        "spgemm.hash": "shoal.kernel.spgemm.hash:Hash",
        "spgemm.hash_v1": "shoal.kernel.spgemm.hash:HashV1",
        "spgemm.hash_v2": "shoal.kernel.spgemm.hash:HashV2",
    },
    about=(
        "One way to compute one operator, called OPERATOR.BACKEND. `kernel: {OPERATOR: "
        "BACKEND}` of a serving job chooses; dispatch takes the one with the lowest estimate "
        "where nothing is said."
    ),
    protocol="shoal.kernel.protocols:Kernel",
)

WEIGHT_FORMATS = PartTable(
    "weight_format",
    {
        "int": "shoal.kernel.formats.integer:Int",
        "uint": "shoal.kernel.formats.affine:Uint",
        "float": "shoal.kernel.formats.floating:Float",
        "bipolar": "shoal.kernel.formats.bipolar:Bipolar",
        "bfp": "shoal.kernel.formats.bfp:Bfp",
        "nf": "shoal.kernel.formats.normal:Nf",
    },
    about=(
        "How a matrix is stored in few bits. Chosen by `shoal model quantize --format` and by "
        "the key `weights` of a serving job, in short texts such as `int4-g128`."
    ),
    protocol="shoal.kernel.protocols:WeightFormat",
)

KV_FORMATS = PartTable(
    "kv_format",
    {
        "plain": "shoal.kernel.kv.plain:Plain",
        "int8": "shoal.kernel.kv.int8:Int8",
        "bfp": "shoal.kernel.kv.bfp:Bfp",
    },
    about=(
        "How the paged cache keeps keys and values. Chosen by the key `kv_format` of a serving job."
    ),
    protocol="shoal.kernel.protocols:KVFormat",
)
