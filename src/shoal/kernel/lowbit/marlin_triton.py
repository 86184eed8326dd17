"""The same product on a GPU, in Triton.

Source: Frantar et al., MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large
Language Models, 2024.

Codes are unpacked in registers: the even and the odd inputs of a group are two products, so
that no code moves to another place. K is cut over programs, whose sums are added in a fixed
order afterwards: results do not depend on how programs are scheduled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.errors import KernelError
from shoal.core.parts import part
from shoal.kernel.base import TritonKernel
from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.formats import weight_format
from shoal.kernel.formats.integer import Int
from shoal.kernel.protocols import PackedMatrix, Ready

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MarlinTriton", "split_of"]

_GROUPS = (32, 64, 128, 256)


def split_of(m: int, n: int, groups: int, programs: int) -> int:
    """Parts of K so that about ``programs`` programs have work; each has a group at least."""
    tiles = -(-m // 16) * -(-n // 64)
    return max(1, min(groups, programs // tiles))


@part
class MarlinTriton(TritonKernel):
    """``tl.dot`` on unpacked codes, a group of K at a time.

    Args:
        block_n: outputs of a program.
        programs: how many should run at once; two for each multiprocessor of a large GPU.
    """

    op: ClassVar[str] = "linear_lowbit"
    compute_share: ClassVar[float] = 0.4

    block_n: int = 64
    programs: int = 256

    def _refuses(self, call: LowbitLinearCall) -> str | None:
        try:
            stored = weight_format(call.format)
            if not isinstance(stored, Int) or stored.width != 4 or stored.keeps_half:
                return "reads int4 with groups only"
            group = stored.group_of(call.k)
        except KernelError as cause:
            return f"cannot read them: {cause}"
        if group not in _GROUPS:
            return f"reads groups of {', '.join(map(str, _GROUPS))}, not {group}"
        return None

    def _prepare(
        self, call: LowbitLinearCall, weight: PackedMatrix, bias_N: Tensor | None = None
    ) -> Ready:
        import torch

        from shoal.kernel.lowbit.marlin import checked
        from shoal.kernel.lowbit.marlin_triton_kernel import w4a16

        checked(weight, call.format, call.n, call.k)
        n, k = call.n, call.k
        group = weight_format(weight.format).group_of(k)
        groups = k // group
        codes, scales = (weight.tensors[name].contiguous() for name in ("codes", "scales"))
        bias = None if bias_N is None else bias_N.detach().float()

        def product(x: Tensor) -> Tensor:
            rows = x.reshape(-1, k)
            m = rows.shape[0]
            split = split_of(m, n, groups, self.programs)
            sums = torch.empty(split, m, n, dtype=torch.float32, device=x.device)
            grid = (-(-m // 16), -(-n // self.block_n), split)
            w4a16[grid](
                rows,
                codes,
                scales,
                sums,
                m,
                n,
                k,
                rows.stride(0),
                rows.stride(1),
                -(-groups // split),
                # Triton's interpreter does not multiply bf16.
                WIDEN=self.interpreted(call),
                GROUP=group,
                BLOCK_N=self.block_n,
            )
            out = sums[0] if split == 1 else sums.sum(0)
            if bias is not None:
                out = out + bias
            return out.to(x.dtype).view(*x.shape[:-1], n)

        return product
