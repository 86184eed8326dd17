"""The same product on a GPU, in Triton.

Source: Frantar et al., MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large
Language Models, 2024.

Codes are unpacked in registers: the even and the odd inputs of a group are two products, so
that no code moves to another place. K is cut over programs, whose sums are added in a fixed
order afterwards: results do not depend on how programs are scheduled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import TritonKernel
from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.lowbit.base import LowbitKernel, checked, refuses_groups
from shoal.kernel.protocols import PackedMatrix, Ready

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.formats.base import BaseFormat


def split_of(m: int, n: int, groups: int, programs: int) -> int:
    """Parts of K so that about ``programs`` programs have work; each has a group at least."""
    tiles = -(-m // 16) * -(-n // 64)
    return max(1, min(groups, programs // tiles))


@part
class MarlinTriton(TritonKernel, LowbitKernel):
    """``tl.dot`` on unpacked codes, a group of K at a time.

    Args:
        block_n: outputs per program.
        programs: number of concurrent programs; two per multiprocessor of a large GPU.
    """

    compute_share: ClassVar[float] = 0.4

    block_n: int = 64
    programs: int = 256

    def _refuses_format(self, call: LowbitLinearCall, stored: BaseFormat, group: int) -> str | None:
        return refuses_groups(stored, group)

    def _prepare(
        self, call: LowbitLinearCall, weight: PackedMatrix, bias_N: Tensor | None = None
    ) -> Ready:
        import torch

        from shoal.kernel.lowbit.marlin_triton_kernel import w4a16

        n, k = call.n, call.k
        group = checked(call, weight).group_of(k)
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
