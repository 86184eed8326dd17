"""What bounds a kernel: its operations over the device's rate, its bytes over the memory's.

Source: Williams et al., Roofline, 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

# Seconds of a kernel that does next to nothing.
FLOOR_S = 1e-5


@dataclass(frozen=True)
class KernelFormat:
    """A format of weights in products.

    Args:
        weight_bytes: bytes of a weight, its scales included.
        rate: products a second over those of bf16, on devices that have units for the format.
    """

    weight_bytes: float
    rate: float = 1.0


FORMATS = {
    "fp32": KernelFormat(4.0, 0.5),
    "bf16": KernelFormat(2.0),
    "fp16": KernelFormat(2.0),
    "fp8": KernelFormat(1.0, 2.0),
    "fp8_block": KernelFormat(1.0, 2.0),
    "int8": KernelFormat(1.0),
    "nvfp4": KernelFormat(0.5625, 4.0),
    "mxfp4": KernelFormat(0.53125),
    "mxfp4_fp8": KernelFormat(0.53125, 2.0),
    "int4": KernelFormat(0.53125),
    "int4_g32": KernelFormat(0.625),
    # Of llama.cpp; those of four bits keep some matrices in five or six: means of its files.
    "q8_0": KernelFormat(1.0625),
    "q6_k": KernelFormat(0.8203),
    "q4_k_m": KernelFormat(0.60),
    "q4_k_s": KernelFormat(0.568),
    "q4_0": KernelFormat(0.564),
    "iq4_xs": KernelFormat(0.533),
}
"""Formats of weights. Integers and mxfp4 are unpacked for products of 16 bits, or of eight."""


def reached(tokens: float, top_k: float, experts: float) -> float:
    """Share of the experts that ``tokens`` tokens reach, drawn evenly."""
    missed: float = (1.0 - top_k / experts) ** tokens
    return 1.0 - missed


def expert_bound_s(
    form: str,
    tokens: float,
    hidden: float,
    inner: float,
    top_k: float,
    experts: float,
    parts: float,
    *,
    flops: float,
    stream: float,
) -> float:
    """Seconds that bound the experts of a mixture layer on one rank, and the floor of a kernel.

    Args:
        form: of the weights.
        tokens: of all ranks.
        hidden: width of the residual stream.
        inner: width of an expert on a rank.
        top_k: experts that a token takes.
        experts: of the layer.
        parts: ranks that the experts are divided over.
        flops: bf16 FLOP/s of the device.
        stream: byte/s of its memory.
    """
    own = FORMATS[form]
    weights = 3.0 * hidden * inner * own.weight_bytes
    read = experts / parts * reached(tokens, top_k, experts) * weights
    passed = tokens * top_k / parts
    read += passed * (2.0 * hidden + 3.0 * inner) * 2.0
    work = 6.0 * hidden * inner * passed
    return max(read / stream, work / (flops * own.rate)) + FLOOR_S
