"""Which backends compute the fused operators of a training run; decided once, before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.core.errors import KernelError, suggestion
from shoal.kernel.calls import Device, Dtype, PointwiseCall
from shoal.kernel.dispatch import dispatch
from shoal.kernel.grouped.call import GroupedLinear

if TYPE_CHECKING:
    from shoal.ir import Machine
    from shoal.ir.shape import ModelShape

OPERATORS = ("rms_norm", "rope", "swiglu")
"""What lies between the products of a decoder."""

# Of a mixture, the products of its experts; a rule chooses by counts where none is named.
_EXPERTS = "grouped_linear"

# These a compiler can look into.
_PLAIN = ("torch", "reference")
_ROWS = 2048


def call_of(op: str, shape: ModelShape, rows: int, dtype: Dtype, device: Device) -> PointwiseCall:
    """What is asked of an operator by a block of the model, for so many tokens."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    n, out = {
        "rms_norm": (shape.hidden, shape.hidden),
        "rope": (heads, heads),
        "swiglu": (2 * shape.ffn_hidden, shape.ffn_hidden),
    }[op]
    return PointwiseCall(op, rows, n, out, dtype, device, gradient=True)  # type: ignore[arg-type]


def choose(
    wanted: Mapping[str, str],
    shape: ModelShape,
    dtype: Dtype,
    *,
    rows: int = _ROWS,
    device: Device = "cpu",
    compiled: bool = False,
    machine: Machine | None = None,
) -> dict[str, str]:
    """The backend of every operator: what is wanted, else what dispatch takes.

    Args:
        wanted: operator -> backend.
        shape: of the model.
        dtype: of the computation.
        rows: tokens of a pass.
        device: where.
        compiled: the model goes through ``torch.compile``.
        machine: where; the machine of this process, if not given.

    Raises:
        KernelError: an operator or backend does not exist, or refuses.
    """
    known = (*OPERATORS, _EXPERTS) if shape.num_experts else OPERATORS
    for op, backend in wanted.items():
        if op not in known:
            raise KernelError(
                f"kernel.{op}: training takes kernels of {', '.join(known)}" + suggestion(op, known)
            )
        if compiled and backend not in _PLAIN:
            raise KernelError(
                f"kernel.{op} = {backend!r}: with compile = true the compiler fuses operators, "
                f"but not {backend}; set compile: false, or use {' or '.join(_PLAIN)}"
            )
    result = {}
    for op in OPERATORS:
        value = wanted.get(op, "torch" if compiled else None)
        call = call_of(op, shape, rows, dtype, device)
        result[op] = dispatch(call, wanted=value, machine=machine).backend
    if _EXPERTS in wanted:
        of = GroupedLinear(rows, shape.num_experts, shape.expert_hidden, shape.hidden, dtype=dtype,
                           device=device)  # fmt: skip
        result[_EXPERTS] = dispatch(of, wanted=wanted[_EXPERTS], machine=machine).backend
    return result
