"""Triton's other kernels: norms, rotations, activations, sampling, recurrences and copies.

See :mod:`gpu.kernel_case`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from gpu.frame import Case
from gpu.kernel_case import Problem, Problems, cases_of
from gpu.place import Place
from shoal.kernel.calls import PointwiseCall as Pointwise
from shoal.kernel.rnn.call import Recurrence
from shoal.kernel.strided.calls import Pack, Unpack
from shoal.kernel.strided.canonical import canonical
from shoal.kernel.strided.datatype import hvector, named

NEEDS = ("torch", "triton")


def cases(place: Place) -> Iterator[Case]:
    """Forward, and with the pass back where training has one."""
    return cases_of(place, problems(place))


def problems(place: Place) -> Problems:
    """Of a model of 1 B parameters."""
    pick, device = place.pick, place.device
    kind = pick("bf16", "fp32")
    dtype = pick(torch.bfloat16, torch.float32)
    randn = functools.partial(torch.randn, device=device, dtype=dtype)

    def norm() -> Problem:
        m, n = pick((4096, 2048), (3, 40))
        weight, x = randn(n), randn(m, n)
        peer = functools.partial(_norm, weight)
        return Problem(Pointwise("rms_norm", m, n, n, kind, device), (weight, 1e-5), (x,),
                       {"F.rms_norm": peer})  # fmt: skip

    def norm_trained() -> Problem:
        m, n = pick((4096, 2048), (3, 40))
        call = Pointwise("rms_norm", m, n, n, kind, device, gradient=True)
        given = (randn(m, n), randn(n))
        return Problem(call, (1e-5,), given, backends=("torch",), gradients=2)

    def rope() -> Problem:
        m, heads, kv, half = pick((4096, 32, 8, 32), (3, 2, 1, 4))
        every = (heads + 2 * kv) * 2 * half
        angle = torch.rand(m, half, device=device) * 6
        constants = (angle.cos(), angle.sin(), None, None, heads, kv, 1e-5)
        given = (randn(m, every), torch.arange(m, device=device))
        return Problem(Pointwise("rope", m, every, every, kind, device), constants, given,
                       backends=("reference",))  # fmt: skip

    def rope_trained() -> Problem:
        rows, length, heads, kv, half = pick((2, 2048, 32, 8, 32), (1, 3, 2, 1, 4))
        every = heads + 2 * kv
        m, width = rows * length, every * 2 * half
        call = Pointwise("rope", m, width, width, kind, device, gradient=True)
        angle = torch.rand(length, half, device=device) * 6
        given = (randn(rows, length, every, 2 * half), angle.cos(), angle.sin(), None, None)
        return Problem(call, (heads, kv, 1e-5), given, backends=("torch",), gradients=1)

    def swiglu() -> Problem:
        m, f = pick((4096, 8192), (3, 33))
        peer = lambda x: F.silu(x[..., :f]) * x[..., f:]  # noqa: E731
        return Problem(Pointwise("swiglu", m, 2 * f, f, kind, device), (), (randn(m, 2 * f),),
                       {"eager": peer})  # fmt: skip

    def swiglu_trained() -> Problem:
        m, f = pick((4096, 8192), (3, 33))
        call = Pointwise("swiglu", m, 2 * f, f, kind, device, gradient=True)
        return Problem(call, (), (randn(m, 2 * f),), backends=("torch",), gradients=1)

    def sample() -> Problem:
        m, v = pick((256, 128256), (3, 200))
        one = functools.partial(torch.ones, m, dtype=torch.float64, device=device)
        chance = torch.rand(m, dtype=torch.float64, device=device)
        top_k = torch.zeros(m, dtype=torch.int64, device=device)
        given = (torch.randn(m, v, device=device), one(), top_k, one(), chance)
        return Problem(Pointwise("sample", m, v, 1, "fp32", device), (), given,
                       backends=("reference",))  # fmt: skip

    def recurrence() -> Problem:
        batch, steps, heads, units = pick((16, 256, 4, 64), (2, 3, 2, 16))
        call = Recurrence("lstm", batch, steps, heads, units, device=device)
        shapes = ((4, heads, units, units), (4, heads, units))
        R, bias = (torch.randn(*shape, device=device) / 8 for shape in shapes)
        wx = torch.randn(batch, steps, 4, heads, units, device=device)
        return Problem(call, (R, bias), (wx, None), backends=("reference",))

    def strided(packs: bool) -> Problem:
        runs, words = pick((2**16, 64), (9, 8))
        layout = canonical(hvector(runs, 1, 4 * words, named(2 * words)))
        source = torch.randint(0, 256, (runs * 4 * words,), dtype=torch.uint8, device=device)
        packed = torch.randint(0, 256, (runs * 2 * words,), dtype=torch.uint8, device=device)
        call = Pack(layout, device) if packs else Unpack(layout, device)
        return Problem(call, (), (source,) if packs else (packed, source), backends=("torch",))

    yield "rms_norm", norm
    yield "rms_norm and its gradient", norm_trained
    yield "rope", rope
    yield "rope and its gradient", rope_trained
    yield "swiglu", swiglu
    yield "swiglu and its gradient", swiglu_trained
    yield "sample", sample
    yield "recurrence, lstm", recurrence
    yield "pack", functools.partial(strided, True)
    yield "unpack", functools.partial(strided, False)


def _norm(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)
