"""kernel: operators, each with a reference that says what it means and kernels that are fast.

The tables of kernels, of weight formats and of cache formats. A kernel is called
``OPERATOR.BACKEND``; which of them computes a call is a question of cost
(:mod:`shoal.kernel.dispatch`).
"""

from shoal.core.parts import PartTable

__all__ = ["KERNELS", "KV_FORMATS", "WEIGHT_FORMATS"]

KERNELS = PartTable(
    "kernel",
    {
        "linear.reference": "shoal.kernel.linear.reference:ReferenceLinear",
        "linear.torch": "shoal.kernel.linear.library:LibraryLinear",
        "linear.cpp": "shoal.kernel.linear.cpp:CppLinear",
        "linear.packed": "shoal.kernel.linear.packed:PackedLinear",
        "linear.amx": "shoal.kernel.linear.amx:AmxLinear",
        "linear.triton": "shoal.kernel.linear.triton:TritonLinear",
        "rms_norm.reference": "shoal.kernel.fused.reference:ReferenceRmsNorm",
        "rms_norm.torch": "shoal.kernel.fused.library:LibraryRmsNorm",
        "rms_norm.cpp": "shoal.kernel.fused.cpp:CppRmsNorm",
        "rms_norm.triton": "shoal.kernel.fused.triton:TritonRmsNorm",
        "rope.reference": "shoal.kernel.fused.reference:ReferenceRope",
        "rope.torch": "shoal.kernel.fused.library:LibraryRope",
        "rope.cpp": "shoal.kernel.fused.cpp:CppRope",
        "rope.triton": "shoal.kernel.fused.triton:TritonRope",
        "swiglu.reference": "shoal.kernel.fused.reference:ReferenceSwiglu",
        "swiglu.torch": "shoal.kernel.fused.library:LibrarySwiglu",
        "swiglu.cpp": "shoal.kernel.fused.cpp:CppSwiglu",
        "swiglu.triton": "shoal.kernel.fused.triton:TritonSwiglu",
        "sample.reference": "shoal.kernel.fused.reference:ReferenceSample",
        "sample.cpp": "shoal.kernel.fused.cpp:CppSample",
        "sample.triton": "shoal.kernel.fused.triton:TritonSample",
        "linear_lowbit.reference": "shoal.kernel.lowbit.reference:ReferenceLowbitLinear",
        "linear_lowbit.integer": "shoal.kernel.lowbit.marlin_cpu:Integer",
        "linear_lowbit.torch": "shoal.kernel.lowbit.peer:LibraryLowbitLinear",
        "linear_lowbit.dequantised": "shoal.kernel.lowbit.peer:Dequantised",
        "linear_lowbit.cpp_w4a16": "shoal.kernel.lowbit.marlin_cpu:W4A16",
        "linear_lowbit.cpp_w4a8": "shoal.kernel.lowbit.marlin_cpu:W4A8",
        "linear_lowbit.triton": "shoal.kernel.lowbit.marlin_triton:MarlinTriton",
        "linear_lowbit.anybit": "shoal.kernel.lowbit.anybit:Anybit",
        "pack.reference": "shoal.kernel.strided.reference:ReferencePack",
        "pack.torch": "shoal.kernel.strided.library:LibraryPack",
        "pack.cpp": "shoal.kernel.strided.cpp:CppPack",
        "pack.triton": "shoal.kernel.strided.triton:TritonPack",
        "unpack.reference": "shoal.kernel.strided.reference:ReferenceUnpack",
        "unpack.torch": "shoal.kernel.strided.library:LibraryUnpack",
        "unpack.cpp": "shoal.kernel.strided.cpp:CppUnpack",
        "unpack.triton": "shoal.kernel.strided.triton:TritonUnpack",
        "paged_attention.reference": "shoal.kernel.paged.reference:ReferencePagedAttention",
        "paged_attention.torch": "shoal.kernel.paged.library:LibraryPagedAttention",
        "paged_attention.cpp": "shoal.kernel.paged.cpp:CppPagedAttention",
        "paged_attention.packed": "shoal.kernel.paged.packed:PackedPagedAttention",
        "paged_attention.amx": "shoal.kernel.paged.amx:AmxPagedAttention",
        "paged_attention.triton": "shoal.kernel.paged.triton:TritonPagedAttention",
        "recurrence.reference": "shoal.kernel.rnn.reference:ReferenceRecurrence",
        "recurrence.alternating": "shoal.kernel.rnn.alternating:AlternatingRecurrence",
        "recurrence.fused": "shoal.kernel.rnn.fused:FusedRecurrence",
        "recurrence.triton": "shoal.kernel.rnn.triton:TritonRecurrence",
        "matmul_planes.reference": "shoal.kernel.planes.reference:ReferencePlanes",
        "matmul_planes.cpp_popcnt": "shoal.kernel.planes.cpp:Popcnt",
        "matmul_planes.cpp_gemv": "shoal.kernel.planes.cpp:Gemv",
        "matmul_planes.cpp_vnni": "shoal.kernel.planes.cpp:Vnni",
        "matmul_planes.cpp_amx": "shoal.kernel.planes.cpp:AmxPlanes",
        "matmul_planes.triton": "shoal.kernel.planes.triton:TritonPlanes",
        "linear_lowbit.packed": "shoal.kernel.lowbit.packed:PackedBytes",
        "linear_lowbit.bipolar": "shoal.kernel.lowbit.bipolar:BipolarLinear",
        "grouped_linear.reference": "shoal.kernel.grouped.reference:ReferenceGroupedLinear",
        "grouped_linear.loop": "shoal.kernel.grouped.loop:Loop",
        "grouped_linear.torch": "shoal.kernel.grouped.library:LibraryGroupedLinear",
        "grouped_linear.padded": "shoal.kernel.grouped.padded:PaddedGroupedLinear",
        "grouped_linear.triton": "shoal.kernel.grouped.triton:TritonGroupedLinear",
        "spgemm.reference": "shoal.kernel.spgemm.reference:ReferenceSpGemm",
        "spgemm.inner": "shoal.kernel.spgemm.inner:Inner",
        "spgemm.outer": "shoal.kernel.spgemm.outer:Outer",
        "spgemm.scipy": "shoal.kernel.spgemm.peer:ScipySpGemm",
        "spgemm.hash": "shoal.kernel.spgemm.hash:Hash",
        "spgemm.hash_v1": "shoal.kernel.spgemm.hash:HashV1",
        "spgemm.hash_v2": "shoal.kernel.spgemm.hash:HashV2",
    },
    about=(
        "An implementation of an operator, named OPERATOR.BACKEND. `kernel: {OPERATOR: "
        "BACKEND}` of a serving job selects one; by default dispatch takes the one with the lowest "
        "estimate."
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
        "How a quantized matrix is stored. Chosen by `shoal model quantize --format` and by "
        "the key `weights` of a serving job, in the short form `int4-g128`."
    ),
    protocol="shoal.kernel.protocols:WeightFormat",
)

KV_FORMATS = PartTable(
    "kv_format",
    {
        "plain": "shoal.kernel.kv.plain:Plain",
        "int8": "shoal.kernel.kv.int8:Int8",
        "bfp": "shoal.kernel.kv.bfp:BfpKVFormat",
    },
    about=(
        "How the paged cache keeps keys and values. Chosen by the key `kv_format` of a serving job."
    ),
    protocol="shoal.kernel.protocols:KVFormat",
)
