"""What all weight formats have in common: groups along K, their grids, and storage.

A row of the matrix is cut in groups; each has a *grid*: the few numbers (a scale, and perhaps
a zero point) that say what its codes mean. A format says how a grid is chosen for a group,
and how weights become codes and codes weights under a grid. The rest is here.

Stored (:class:`~shoal.kernel.protocols.PackedMatrix`): ``codes``, the bit stream of every row
(:mod:`shoal.kernel.formats.bits`), and every tensor of the grid, [N, K / group]. Where two of
four neighbours are kept, ``codes`` has the K / 2 kept ones in order, and ``places``, a bit
stream of 4 bits for every four weights, says where they stood: the first place in the lower two
bits, the second, which is larger, above.

Shapes: N outputs, K inputs, G groups of a row, g weights of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from shoal.core.errors import KernelError
from shoal.kernel.protocols import PackedMatrix

if TYPE_CHECKING:
    from torch import Tensor

Grid = Mapping[str, "Tensor"]
"""Name -> [N, G]: what the codes of each group mean."""


class BaseFormat:
    """Base of the parts of kind ``weight_format``.

    Attributes:
        grid_bits: bits of the grid of one group, by the name of its tensors.
    """

    grid_bits: ClassVar[Mapping[str, int]] = {"scales": 16}

    # Fields of the parts, which are dataclasses.
    width: int
    group: int | None

    @classmethod
    def read(cls, digits: str, text: str) -> dict[str, object]:
        """Options from the text after the name of the format, such as the 4 of int4.

        Args:
            digits: what stands there.
            text: all of it, for messages.

        Raises:
            KernelError: that is no width of this format.
        """
        if not digits.isdecimal() or not 1 <= int(digits) <= 8:
            raise KernelError(
                f"weight format {text!r}: {digits or 'nothing'!r} is not a width; expected 1 to 8 "
                "bits"
            )
        return {"width": int(digits)}

    def __str__(self) -> str:
        return f"{self._name()}-{'channel' if self.group is None else f'g{self.group}'}"

    def _name(self) -> str:
        return f"{type(self).__name__.lower()}{self.width}"

    @property
    def keeps_half(self) -> bool:
        """Two of four neighbours along K are kept, the others are 0."""
        return False

    @property
    def code_bits(self) -> int:
        return self.width

    @property
    def bits(self) -> float:
        codes = self.code_bits / 2 + 1 if self.keeps_half else self.code_bits
        return codes + (0.0 if self.group is None else sum(self.grid_bits.values()) / self.group)

    def group_of(self, k: int) -> int:
        """Weights of a row that share a scale.

        Raises:
            KernelError: ``k`` is not a multiple of the group; names the nearest that is.
        """
        step = self.group or 1
        if self.keeps_half:
            if step > 1 and step % 4:
                raise KernelError(
                    f"weight format {self}: expected a group of a multiple of 4, of which two of "
                    f"four are kept; nearest g{max(4, step // 4 * 4)}"
                )
            step = math.lcm(step, 4)
        if k < 1 or k % step:
            low, high = k // step * step, (k // step + 1) * step
            near = f"{low} and {high}" if low else str(high)
            legal = [g for g in (256, 128, 64, 32, 16, 8) if k > 0 and k % g == 0]
            hint = f", or a group of {legal[0]}" if legal and self.group else ""
            raise KernelError(
                f"weight format {self}: rows of K = {k} weights: expected a multiple of {step}; "
                f"nearest {near}{hint}"
            )
        return self.group or k

    # What a format defines.

    def grid(self, weight_NGg: Tensor, clip: Tensor | float = 1.0) -> dict[str, Tensor]:
        """The grid of each group.

        Args:
            weight_NGg: fp32; all of it finite.
            clip: share of the largest magnitude (of the range) that is still represented: a
                number, or one for each group [N, G].

        Raises:
            KernelError: a scale does not fit its type.
        """
        raise TypeError(f"{type(self).__name__} has no grid")

    def encode(self, weight: Tensor, grid: Grid) -> Tensor:
        """Nearest codes, uint8; the grid's tensors broadcast against ``weight``."""
        raise TypeError(f"{type(self).__name__} has no codes")

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        """What codes mean, fp32; the grid's tensors broadcast against ``codes``."""
        raise TypeError(f"{type(self).__name__} has no codes")

    # What all of them do.

    def groups(self, weight_NK: Tensor) -> Tensor:
        """[N, K] -> [N, G, g], fp32.

        Raises:
            KernelError: no matrix, K does not divide, or a weight is not finite.
        """
        from shoal.kernel.tensors import finite

        if weight_NK.dim() != 2 or not weight_NK.dtype.is_floating_point:
            raise KernelError(
                f"weight: {weight_NK.dtype} {list(weight_NK.shape)}: expected a matrix [N, K] of "
                "floating-point numbers"
            )
        group = self.group_of(weight_NK.shape[1])
        n, k = weight_NK.shape
        return finite("weight", weight_NK.detach().float()).reshape(n, k // group, group)

    def halve(self, weight_NK: Tensor) -> Tensor:
        """Which weights are kept, bool [N, K]: of each four the two of largest magnitude."""
        fours = _fours(weight_NK.detach().abs())
        # Stable: of equals the first two stay.
        order = fours.argsort(dim=-1, descending=True, stable=True)
        ranks = order.argsort(dim=-1, stable=True)
        kept: Tensor = (ranks < 2).flatten(1)
        return kept

    def quantize(self, weight_NK: Tensor) -> PackedMatrix:
        """Round to nearest.

        Raises:
            KernelError: K does not divide, or a weight is NaN or infinite (named by place).
        """
        weight_NGg = self.groups(weight_NK)
        keep = None
        if self.keeps_half:
            keep = self.halve(weight_NGg.flatten(1))
            weight_NGg = weight_NGg * keep.view_as(weight_NGg)
        grid = self.grid(weight_NGg)
        columns = {name: tensor[..., None] for name, tensor in grid.items()}
        return self.pack(self.encode(weight_NGg, columns).flatten(1), grid, keep)

    def pack(self, codes_NK: Tensor, grid: Grid, keep_NK: Tensor | None = None) -> PackedMatrix:
        """Store codes under a grid.

        Args:
            codes_NK: uint8.
            grid: as of :meth:`grid`.
            keep_NK: bool, two of every four; only where the format keeps half.

        Raises:
            KernelError: a code has too many bits, or not two of four are kept.
        """
        import torch

        from shoal.kernel.formats.bits import pack

        tensors: dict[str, Tensor] = {}
        shape = (codes_NK.shape[0], codes_NK.shape[1])
        if self.keeps_half:
            if keep_NK is None or bool((_fours(keep_NK).sum(-1) != 2).any()):
                raise KernelError(
                    f"weight format {self}: expected two nonzero weights in every four"
                )
            # nonzero goes in order, so the two places of each four follow each other.
            place = _fours(keep_NK).nonzero()[:, 2].view(shape[0], -1, 2)
            nibbles = (place[..., 0] | place[..., 1] << 2).to(torch.uint8)
            tensors["codes"] = pack(codes_NK[keep_NK].view(shape[0], -1), self.code_bits)
            tensors["places"] = pack(nibbles, 4)
        else:
            tensors["codes"] = pack(codes_NK, self.code_bits)
        tensors |= {name: tensor.contiguous() for name, tensor in grid.items()}
        return PackedMatrix(str(self), shape, tensors)

    def kept(self, packed: PackedMatrix) -> Tensor | None:
        """Place of every kept weight in its four, int64 [N, K / 4, 2]; None where all are kept.

        Raises:
            KernelError: the two places of a four are not in order.
        """
        import torch

        from shoal.kernel.formats.bits import unpack

        if not self.keeps_half:
            return None
        nibbles = unpack(packed.tensors["places"], 4, packed.shape[1] // 4).long()
        places = torch.stack((nibbles & 3, nibbles >> 2), -1)
        if not bool((places[..., 0] < places[..., 1]).all()):
            raise KernelError(
                f"weight format {self}: positions: expected two different ones in ascending order"
            )
        return places

    def unpack(self, packed: PackedMatrix) -> Tensor:
        """The codes, uint8: [N, K], or [N, K / 2] where half are kept."""
        from shoal.kernel.formats.bits import unpack

        k = packed.shape[1]
        return unpack(packed.tensors["codes"], self.code_bits, k // 2 if self.keeps_half else k)

    def grid_of(self, packed: PackedMatrix) -> dict[str, Tensor]:
        """The grid, by the names of its tensors."""
        return {name: packed.tensors[name] for name in self.grid_bits}

    def check(self, packed: PackedMatrix) -> None:
        """Hold a stored matrix against its format.

        Raises:
            KernelError: another format, a missing tensor, a wrong shape, a scale that is not
                finite; the message says which.
        """
        import torch

        from shoal.kernel.formats.bits import row_bytes
        from shoal.kernel.tensors import finite

        n, k = packed.shape
        groups = k // self.group_of(k)
        expected = {"codes": (n, row_bytes(k // 2 if self.keeps_half else k, self.code_bits))}
        if self.keeps_half:
            expected["places"] = (n, row_bytes(k // 4, 4))
        expected |= dict.fromkeys(self.grid_bits, (n, groups))
        if packed.format != str(self) or set(packed.tensors) != set(expected):
            raise KernelError(
                f"packed {packed.format} {list(packed.shape)} with "
                f"{', '.join(packed.tensors) or 'nothing'}: expected {self} with "
                f"{', '.join(expected)}"
            )
        for name, shape in expected.items():
            tensor = packed.tensors[name]
            small = torch.int8 if name == "exponents" else torch.uint8
            dtype = torch.float16 if name == "scales" else small
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise KernelError(
                    f"packed {self} {list(packed.shape)}: {name} is {tensor.dtype} "
                    f"{list(tensor.shape)}: expected {dtype} {list(shape)}"
                )
        if "scales" in packed.tensors:
            finite("scales", packed.tensors["scales"])

    def dequantize(self, packed: PackedMatrix) -> Tensor:
        """[N, K] in fp32, exactly what the codes mean.

        Raises:
            KernelError: the tensors are not those of this format.
        """
        import torch

        self.check(packed)
        n, k = packed.shape
        group = self.group_of(k)
        grid = {name: tensor[..., None] for name, tensor in self.grid_of(packed).items()}
        places = self.kept(packed)
        if places is None:
            return self.decode(self.unpack(packed).view(n, -1, group), grid).reshape(n, k)
        values = self.decode(self.unpack(packed).view(n, -1, group // 2), grid)
        out = torch.zeros(n, k // 4, 4, dtype=torch.float32, device=values.device)
        return out.scatter_(-1, places, values.reshape(n, -1, 2)).view(n, k)


def _fours(matrix_NK: Tensor) -> Tensor:
    return matrix_NK.reshape(matrix_NK.shape[0], matrix_NK.shape[1] // 4, 4)


def half_scale(scale: Tensor, where: object) -> Tensor:
    """Scales in fp16, none of which becomes 0 that was not.

    Args:
        scale: fp32, at least 0.
        where: the format, for messages.

    Raises:
        KernelError: one is larger than fp16 can hold.
    """
    import torch

    if scale.numel() and float(scale.max()) > 65504:
        raise KernelError(
            f"weight format {where}: a scale of {float(scale.max()):g} is larger than 65504, the "
            "largest fp16 value; scale the weights first"
        )
    half = scale.to(torch.float16)
    return torch.where(scale > 0, half.clamp(min=2.0**-24), half)
