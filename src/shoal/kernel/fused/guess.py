"""What a drafter does beside its products, in calls that a tape can hold.

Shapes: R rows, D hidden, V vocabulary, K guesses behind each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.core.native import compiler, cpu_flags
from shoal.kernel.native import function

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_NEEDS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"})


def native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether both are calls of C++ for tensors of this type on this device."""
    fits = dtype in _NAMES and device.type == "cpu" and cpu_flags() >= _NEEDS
    return fits and compiler() is not None


def gate(x_RX: Tensor, table_VX: Tensor, tokens_R: Tensor, out_RD: Tensor) -> None:
    """Mix features with tokens: ``z u + (1 - z) v`` with ``z = sigmoid(a + b)``.

    Args:
        x_RX: u and a side by side [R, 2 D].
        table_VX: of each token v and b side by side [V, 2 D].
        tokens_R: int64, below V.
        out_RD: written.
    """
    rows, width = out_RD.shape
    function("guess", f"guess_gate_{_NAMES[x_RX.dtype]}", "ppppll")(
        x_RX.data_ptr(), table_VX.data_ptr(), tokens_R.data_ptr(), out_RD.data_ptr(), rows, width
    )


def best(logits_RV: Tensor, tokens_RK: Tensor, values_RK: Tensor) -> None:
    """The K best tokens behind each row, best first, and the logs of their probabilities.

    Args:
        logits_RV: scores, contiguous.
        tokens_RK: int64, written; of equal scores the first token comes first.
        values_RK: fp32, written.
    """
    rows, count = tokens_RK.shape
    function("guess", f"guess_best_{_NAMES[logits_RV.dtype]}", "ppplll")(
        logits_RV.data_ptr(), tokens_RK.data_ptr(), values_RK.data_ptr(), rows,
        logits_RV.shape[-1], count,
    )  # fmt: skip
