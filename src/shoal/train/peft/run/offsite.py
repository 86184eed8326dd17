"""A model between whose trained ends some blocks are left out until it is merged."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import nn

from shoal.core.errors import require
from shoal.model.transformer import Transformer
from shoal.train.peft.run.handle import ModelPeftHandle

if TYPE_CHECKING:
    from shoal.train.peft.offsite import Offsite


def kept_of(count: int, share: float) -> list[int]:
    """Which of so many blocks stay, evenly from the first to the last."""
    number = round(count * share)
    if number < 2:
        return [count // 2][:number]
    return [round(place * (count - 1) / (number - 1)) for place in range(number)]


class OffsiteEmulator(ModelPeftHandle):
    """Copies of the blocks at both ends are trained; the model's own are not touched.

    Raises:
        ConfigError: there is no block between the ends.
    """

    def __init__(self, model: nn.Module, method: Offsite) -> None:
        path = _path(model)
        own = model.get_submodule(path)
        assert isinstance(own, nn.ModuleList)
        last = len(own) - method.last
        require(
            method.first < last,
            "finetune.offsite.first",
            method.first,
            expected=f"with last = {method.last} fewer than the {len(own)} blocks of the model",
        )
        super().__init__(model, method.name, method, mergeable=True)
        between = list(own)[method.first : last]
        outer = [n for n in range(len(own)) if not method.first <= n < last]
        trained = {n: copy.deepcopy(own[n]).requires_grad_(True) for n in outer}
        self.modules |= {f"model.layers.{n}": block for n, block in trained.items()}
        begin = [block for n, block in trained.items() if n < method.first]
        end = [block for n, block in trained.items() if n >= last]
        some = [between[place] for place in kept_of(len(between), method.keep)]
        self._path = path
        self._thin = nn.ModuleList([*begin, *some, *end])
        self._full = nn.ModuleList([*begin, *between, *end])
        self.replace(path, self._thin)

    def merge(self, *, dequantise: bool = False) -> None:
        """Put the trained ends around all blocks; the output is the whole model's from now on."""
        self._show(self._full)
        self.is_merged = True

    def unmerge(self) -> None:
        self._show(self._thin)
        self.is_merged = False

    def _show(self, blocks: nn.ModuleList) -> None:
        parent, _, leaf = self._path.rpartition(".")
        setattr(self.model.get_submodule(parent) if parent else self.model, leaf, blocks)


def _path(model: nn.Module) -> str:
    """Where the blocks of a model are: its longest list of modules."""
    if isinstance(model, Transformer):
        return "blocks"
    named_modules = model.named_modules()
    lists: dict[str, int] = {n: len(m) for n, m in named_modules if isinstance(m, nn.ModuleList)}
    require(bool(lists), "finetune.offsite", type(model).__name__, expected="a model with blocks")
    return max(lists, key=lambda name: lists[name])
