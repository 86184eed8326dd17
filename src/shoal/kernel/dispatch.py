"""Which kernel computes a call: the one that would be fastest on this machine.

``dispatch(call)`` asks every kernel of the operator whether it can, and takes the one whose
estimate on the probed machine is lowest. A config says otherwise with one key::

    kernel: {linear: torch, paged_attention: reference}
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from shoal.core.errors import KernelError, MachineError, suggestion
from shoal.core.native import cpu_flags
from shoal.core.parts import table
from shoal.cost.gpu.nearest import nearest
from shoal.ir import Machine
from shoal.kernel.protocols import Call, Kernel
from shoal.machine import host


def operators() -> tuple[str, ...]:
    """Names of all operators."""
    return tuple(dict.fromkeys(name.partition(".")[0] for name in table("kernel")))


@functools.cache
def kernels_of(op: str) -> Mapping[str, Kernel]:
    """Backend -> kernel of an operator, in the order of the table.

    Raises:
        KernelError: there is no such operator.
    """
    parts = table("kernel")
    kernels = {
        name.partition(".")[2]: parts.build(name) for name in parts if name.partition(".")[0] == op
    }
    if not kernels:
        raise KernelError(
            f"kernel.{op}: no such operator; there are {', '.join(operators())}"
            + suggestion(op, operators())
        )
    return kernels


@functools.cache
def here(device: str = "cpu") -> Machine:
    """The machine of this process: as it was probed, or as far as it is known without.

    Args:
        device: cpu or cuda, whose calls are priced.
    """
    from shoal.machine import described

    try:
        machine = described.load("local")
    except MachineError:
        machine = _unprobed(described.load("laptop"))
    if device == "cuda" and machine.device.kind != "gpu":
        import torch

        if torch.cuda.is_available():
            return nearest(torch.cuda.get_device_name())[0]
    return machine


# FLOP that a core does in a cycle at the least, by what it needs for that.
_PER_CYCLE = (
    ("fp32", 32, frozenset({"avx512f"})),
    ("bf16", 64, frozenset({"avx512_bf16"})),
    ("bf16", 512, frozenset({"amx_bf16"})),
)
_CYCLES_PER_S = 2.5e9


def _unprobed(machine: Machine) -> Machine:
    """``machine`` with as many cores as this host, and with the rates of their instructions."""
    cores, flags = len(host.cpus()), cpu_flags()
    one = {
        name: rate / (machine.device.num_cores or 1)
        for name, rate in machine.device.peak_flops.items()
    }
    one |= {name: _CYCLES_PER_S * flop for name, flop, needs in _PER_CYCLE if needs <= flags}
    peak = {name: cores * rate for name, rate in one.items()}
    device = machine.device.model_copy(update={"num_cores": cores, "peak_flops": peak})
    return machine.model_copy(update={"device": device})


def candidates(call: Call, machine: Machine | None = None) -> list[tuple[str, float]]:
    """Backends that can compute the call, fastest first, with their estimated seconds.

    Those that would be interpreted are not among them: they are taken by name only.
    """
    target = machine or here(getattr(call, "device", "cpu"))
    able = [
        (backend, kernel.estimate(call, target).step_s.value)
        for backend, kernel in kernels_of(call.op).items()
        if not kernel.interpreted(call) and kernel.refuses(call) is None
    ]
    return sorted(able, key=lambda pair: pair[1])


def dispatch(
    call: Call, *, wanted: str | None = None, machine: Machine | None = None, exact: bool = False
) -> Kernel:
    """The kernel for a call.

    Args:
        call: the call.
        wanted: the backend that must be taken; the fastest, if not given.
        machine: where; the machine of this process, if not given.
        exact: only kernels whose rows do not depend on what else is computed.

    Raises:
        KernelError: the wanted backend does not exist or refuses, or nothing can.
    """
    if machine is None:
        return _remembered(call, wanted, exact)  # type: ignore[arg-type]  # calls are frozen
    return _dispatch(call, wanted, machine, exact)


@functools.lru_cache(maxsize=4096)
def _remembered(call: Any, wanted: str | None, exact: bool) -> Kernel:
    return _dispatch(call, wanted, here(getattr(call, "device", "cpu")), exact)


def _dispatch(call: Any, wanted: str | None, machine: Machine, exact: bool) -> Kernel:
    kernels = kernels_of(call.op)
    if wanted is not None:
        if wanted not in kernels:
            raise KernelError(
                f"kernel.{call.op} = {wanted!r}: expected one of {', '.join(kernels)}"
                + suggestion(wanted, kernels)
            )
        reason = kernels[wanted].refuses(call)
        if reason is None and exact and not kernels[wanted].invariant:
            reason = (
                "gives results whose bits depend on the other rows, and the call requires exact"
            )
        if reason is not None:
            able = ", ".join(backend for backend, _ in candidates(call, machine)) or "none"
            raise KernelError(f"kernel.{call.op} = {wanted!r}: it {reason}; these can: {able}")
        return kernels[wanted]
    for backend, _ in candidates(call, machine):
        if kernels[backend].invariant or not exact:
            return kernels[backend]
    reasons = "; ".join(f"{name} {kernel.refuses(call)}" for name, kernel in kernels.items())
    raise KernelError(f"kernel.{call.op}: nothing can compute {call}: {reasons}")
