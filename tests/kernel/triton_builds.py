"""Compiles every Triton program for a GPU, which needs none; run as a program by its test.

The interpreter forgives what the compiler refuses: names and types that it does not know, and
more memory on chip than there is.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shoal.kernel.fused import triton_code as fused
from shoal.kernel.fused import triton_training_code as training
from shoal.kernel.grouped import triton_code as grouped
from shoal.kernel.linear import triton_code as linear
from shoal.kernel.lowbit import marlin_triton_kernel as marlin
from shoal.kernel.paged import triton_code as paged
from shoal.kernel.planes import triton_code as planes
from shoal.kernel.rnn import triton_code as rnn
from shoal.kernel.strided import triton_code as strided

# Bytes on chip that a program may have on a data centre's GPU of 2020.
ROOM = 163 * 1024


def build(fn: Any, types: str, stages: int = 3, **constants: Any) -> None:
    """One program; ``types`` of what is no constant, in order, ``1`` for a number that is 1."""
    free = iter(types.split())
    signature = {name: "constexpr" if name in constants else next(free) for name in fn.arg_names}
    ones = {name: 1 for name, kind in signature.items() if kind == "1"}
    signature |= dict.fromkeys(ones, "constexpr")
    assert next(free, None) is None, fn
    source = ASTSource(fn, signature, constants | ones)
    target, options = GPUTarget("cuda", 80, 32), {"num_stages": stages}
    made: Any = triton.compile(source, target=target, options=options)
    assert made.metadata.shared <= ROOM, (fn, constants, made.metadata.shared)


def main(*, small: bool) -> None:
    """All programs, as the kernels launch them, or with small tiles, which is faster."""
    wide = 16 if small else 128
    warnings.simplefilter("ignore")
    for kind in ("*fp32", "*bf16"):
        build(fused.rms_norm, f"{kind} " * 4 + "i32 fp32", ADDS=True, BLOCK=1024)
        build(
            linear.product, f"{kind} {kind} *fp32 {kind} i32 i32 i32",
            HAS_BIAS=True, WIDEN=False, BLOCK_M=16, BLOCK_N=64, BLOCK_K=wide,
        )  # fmt: skip
        tile = {"WIDEN": False, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": min(64, wide)}
        three = f"{kind} {kind} {kind} *i32 i32 i32"
        # As they lie, and for the gradient of rows, whose matrices are read the other way.
        build(grouped.product, f"{three} i32 i32 1", **tile)
        build(grouped.product, f"{three} i32 1 i32", **tile)
        build(grouped.gradient, three, **tile)
        codes = f"{kind} *u8 *fp16 *fp32 i32 i32 i32 i32 1 i32"
        build(marlin.w4a16, codes, WIDEN=False, GROUP=max(32, wide), BLOCK_N=64)
    turned = "*bf16 *fp32 *fp32 *i64 *bf16 *bf16 i32 i32 i32 fp32"
    build(fused.rope, turned, Q_NORM=True, K_NORM=True, BLOCK=64)
    build(fused.swiglu, "*bf16 *bf16 i32", BLOCK=1024)
    weighted = "*bf16 *bf16 *fp32 *bf16 *fp32 i32 i32 fp32"
    build(training.rms_norm_grad, weighted, ROWS=32, BLOCK=1024)
    build(training.swiglu_grad, "*bf16 *bf16 *bf16 i32", BLOCK=1024)
    back = "*bf16 *bf16 *fp32 *fp32 *fp32 *fp32 *fp32 i32 i32 i32 i32 i32 i32 fp32"
    build(training.rope_grad, back, NORMS=True, ROWS=32, BLOCK=64)
    build(fused.sample, "*fp64 *fp64 *fp64 *i64 i32", BLOCK=1024)
    sizes = {"GROUP": 4, "GP": 16, "D": wide, "DP": wide, "CHUNK": 512}
    build(paged.fold, "*bf16 *i64 *fp32 *fp32 *fp32 i32", **sizes)
    for form, cached in enumerate((("*bf16", "*bf16"), ("*i8", "*fp32"), ("*u8", "*u8"))):
        codes, scales = cached
        build(
            paged.chunks,
            f"*bf16 {codes} {codes} {scales} {scales} *i32 *i64 *i64 *i64 *fp32 *fp32 *fp32 fp32 "
            + "i32 " * 12,
            **sizes, SIZE=16, STEP=min(64, wide), FORM=form, BLOCK=32 if form == 2 else 1,
            TREE=form == 0,
        )  # fmt: skip
    tile = {"BM": 32, "BN": 32 if small else 64, "BK": max(32, wide)}
    for bits, long in ((2, False), (8, True)):
        out = "*i64" if long else "*i32"
        words = f"*i32 *i32 {out} i32 i32 i32 i32"
        build(planes.planes_product, words, 1, A=bits, W=bits, WIDE=long, **tile)
    for name in range(4):
        for kind, width in (("*fp32", wide // 2), ("*bf16", wide)):
            if small and kind == "*fp32":
                continue
            shape = {"FN": name, "WIDEN": False, "BB": 16, "DP": width}
            given = f"{kind} {kind}" + " *fp32" * 5
            build(rnn.forward, f"{given} i32 i32 i32 i32", KEEP=True, **shape)
            build(rnn.backward, f"{kind}" + " *fp32" * 10 + " fp32 i32 i32 i32 i32", 1, **shape)
    # A number that is 1 is a constant to the compiler.
    build(rnn.forward, "*fp32 " * 7 + "1 1 1 1", KEEP=True, FN=1, WIDEN=False, BB=16, DP=16)
    build(rnn.backward, "*fp32 " * 11 + "fp32 1 1 1 1", 1, FN=0, WIDEN=False, BB=16, DP=16)
    build(fused.sample, "*fp64 *fp64 *fp64 *i64 1", BLOCK=1)
    build(marlin.w4a16, "*fp32 *u8 *fp16 *fp32 1 1 i32 i32 1 1", WIDEN=False, GROUP=32, BLOCK_N=64)
    for word in ("*i8", "*i64"):
        for packs in (True, False):
            build(
                strided.move, f"{word} {word} i32 1 1 i32 i32", BLOCK=1024, PLANES=packs, PACK=packs
            )
    print("compiled")


if __name__ == "__main__":
    main(small="small" in sys.argv)
