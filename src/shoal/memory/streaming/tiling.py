"""Linear layers in tiles, of which one at a time is on the device.

Source: Rajbhandari et al., ZeRO-Infinity, 2021, section 5.1.3 (memory-centric tiling).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from shoal.core.errors import require


class Tile(NamedTuple):
    """A parameter that is a box of another one.

    Args:
        whole: name of the parameter that it is cut from.
        offset: where it begins there.
        shape: of the whole parameter.
    """

    whole: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]


class TiledLinear(nn.Module):
    """A linear layer that is multiplied tile by tile.

    Each tile is a module with parameters of its own, so code that streams parameters has only one
    tile and its gradient on the device.

    Args:
        in_splits: parts of the input; their products are added.
        out_splits: parts of the output, which are concatenated.

    Raises:
        ConfigError: more parts than features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
    ) -> None:
        super().__init__()
        require(
            1 <= in_splits <= in_features,
            "TiledLinear in_splits",
            in_splits,
            expected=f"1 to {in_features}",
        )
        require(
            1 <= out_splits <= out_features,
            "TiledLinear out_splits",
            out_splits,
            expected=f"1 to {out_features}",
        )
        self.in_features, self.out_features = in_features, out_features
        self._ins = _bounds(in_features, in_splits)
        self._outs = _bounds(out_features, out_splits)
        self.tiles = nn.ModuleList(
            nn.Linear(c1 - c0, r1 - r0, bias=bias and c0 == 0)
            for r0, r1 in self._outs
            for c0, c1 in self._ins
        )

    @classmethod
    @torch.no_grad()
    def of(cls, linear: nn.Linear, *, in_splits: int = 1, out_splits: int = 1) -> TiledLinear:
        """The same layer in tiles; its values are copied, or stay on ``meta``."""
        with torch.device("meta"):
            made = cls(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                in_splits=in_splits,
                out_splits=out_splits,
            )
        for leaf, box, shape in made._leaves():
            whole = cast("Tensor", getattr(linear, leaf.rpartition(".")[2]))
            part = whole[tuple(slice(o, o + s) for o, s in zip(box, shape, strict=True))]
            owner, _, name = leaf.rpartition(".")
            fresh = nn.Parameter(part.clone(), requires_grad=whole.requires_grad)
            setattr(made.get_submodule(owner), name, fresh)
        return made

    def boxes(self, name: str) -> dict[str, Tile]:
        """Parameter of a tile -> the box of the layer's parameter, for a layer of this name."""
        whole = {"weight": (self.out_features, self.in_features), "bias": (self.out_features,)}
        return {
            f"{name}.{leaf}": Tile(
                f"{name}.{leaf.rpartition('.')[2]}", box, size, whole[leaf.rpartition(".")[2]]
            )
            for leaf, box, size in self._leaves()
        }

    def _leaves(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Name of each tile's parameter, its offset and its shape."""
        leaves: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        places = [(r0, c0) for r0, _ in self._outs for c0, _ in self._ins]
        for number, ((row, column), linear) in enumerate(zip(places, self.tiles, strict=True)):
            assert isinstance(linear, nn.Linear)
            shape = (linear.out_features, linear.in_features)
            leaves.append((f"tiles.{number}.weight", (row, column), shape))
            if linear.bias is not None:
                leaves.append((f"tiles.{number}.bias", (row,), shape[:1]))
        return leaves

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        parts: list[Tensor] = []
        for row in range(len(self._outs)):
            total: Tensor | None = None
            for column, (first, stop) in enumerate(self._ins):
                product = self.tiles[row * len(self._ins) + column](x[..., first:stop])
                total = product if total is None else total + product
            assert total is not None
            parts.append(total)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _bounds(size: int, parts: int) -> list[tuple[int, int]]:
    each = -(-size // parts)
    return [(at, min(at + each, size)) for at in range(0, size, each)]


def tile(
    model: nn.Module, most: int, *, tiles: int | None, keep: Collection[str] = ()
) -> dict[str, Tile]:
    """Replace linear layers of a model by tiles.

    Args:
        model: changed in place.
        most: elements of a tile; larger layers are cut by output until none is larger.
        tiles: cut every layer into so many instead.
        keep: last names of layers that are left as they are.

    Returns:
        Parameter of a tile -> the box of the parameter that it is cut from.
    """
    result: dict[str, Tile] = {}
    for name, module in list(model.named_modules()):
        # Of a class of its own, a layer may be used in ways that tiles have not.
        if type(module) is not nn.Linear or name.rpartition(".")[2] in keep:
            continue
        size = module.weight.numel()
        splits = tiles or -(-size // max(most, module.in_features))
        splits = min(splits, module.out_features)
        if splits > 1:
            made = TiledLinear.of(module, out_splits=splits)
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, made)
            result |= made.boxes(name)
    return result
