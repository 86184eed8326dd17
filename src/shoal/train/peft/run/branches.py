"""Modules on and beside the branches of blocks.

Shapes: D width of the residual stream, b width of the bottleneck.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.train.peft.base import matches
from shoal.train.peft.run.low_rank import drawn

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle

_ATTRIBUTE = "finetuned"


@dataclass(frozen=True)
class BlockBranch:
    """Attention or feed-forward of one block.

    Args:
        name: as patterns and files call it.
        width: of the stream that it reads and adds to, D.
        layer: number of its block.
    """

    name: str
    path: str
    width: int
    layer: int


def _every(model: nn.Module) -> list[BlockBranch]:
    from shoal.model.transformer import Transformer

    if isinstance(model, Transformer):
        return [
            BlockBranch(f"model.layers.{n}.{theirs}", f"blocks.{n}.{ours}", model.config.hidden, n)
            for n in range(len(model.blocks))
            for ours, theirs in (("attention", "self_attn"), ("mlp", "mlp"))
        ]
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    results = []
    for name, module in model.named_modules():
        inner = [part for part in module.modules() if hasattr(part, "in_features")]
        if not name or not inner or module is inner[0]:
            continue
        number = re.findall(r"\.(\d+)(?=\.|$)", f".{name}")
        results.append(
            BlockBranch(name, name, width or inner[0].in_features, int(number[-1]) if number else 0)
        )
    return results


def find_branches(model: nn.Module, targets: str, where: str) -> list[BlockBranch]:
    """The branches that patterns match.

    Raises:
        ConfigError: none, or one that has a module already.
    """
    every = _every(model)
    chosen = [branch for branch in every if matches(branch.name, targets)]
    if not chosen:
        leaves = sorted({branch.name.rpartition(".")[2] for branch in every})
        raise ConfigError(
            f"{where} = {targets!r}: matches no branch; there are *.{', *.'.join(leaves)}"
        )
    for branch in chosen:
        if hasattr(model.get_submodule(branch.path), _ATTRIBUTE):
            raise ConfigError(
                f"{where}: {branch.name} is already changed by a method; remove that one, or give "
                "a hybrid method such as unipelt or mam"
            )
    return chosen


def num_blocks(model: nn.Module) -> int:
    """Blocks of a model that has branches."""
    return 1 + max((branch.layer for branch in _every(model)), default=-1)


def hook(handle: ModelPeftHandle, branch: BlockBranch, module: nn.Module) -> None:
    """Let ``module(inputs, outputs)`` change what a branch gives, until the method is removed."""
    owner = handle.model.get_submodule(branch.path)
    handle.attach(branch.path, _ATTRIBUTE, module, f"{branch.name}.{_ATTRIBUTE}")

    def changed(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        if isinstance(out, tuple):
            return (module(x, out[0]), *out[1:])
        return module(x, out)

    registered = owner.register_forward_hook(changed, with_kwargs=True)
    handle.later(registered.remove)


class Bottleneck(nn.Module):
    """up(gelu(down(.))), zero at first.

    Args:
        beside: it reads the inputs of the branch, not the outputs.
    """

    def __init__(
        self,
        branch: BlockBranch,
        bottleneck: int,
        *,
        seed: int,
        beside: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.beside, self.scale, self.layer = beside, scale, branch.layer
        width = branch.width
        self.down = nn.Parameter(
            drawn((bottleneck, width), width**-0.5, seed, f"{branch.name}.down")
        )
        self.down_bias = nn.Parameter(torch.zeros(bottleneck))
        self.up = nn.Parameter(torch.zeros(width, bottleneck))
        self.up_bias = nn.Parameter(torch.zeros(width))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Down [b, D] and up [D, b]."""
        return self.down, self.up

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """Outputs of the branch, changed."""
        down, up = self.matrices()
        given = x if self.beside else out
        inner = F.gelu(F.linear(given.to(down.dtype), down, self.down_bias))
        return out + F.linear(inner, up, self.up_bias).to(out.dtype) * self.scale


class DroppedBottleneck(Bottleneck):
    """One that the first blocks leave out.

    Args:
        drop: number of blocks without it; in training, the largest number.
    """

    def __init__(self, branch: BlockBranch, bottleneck: int, *, drop: int, seed: int) -> None:
        super().__init__(branch, bottleneck, seed=seed)
        self._drop, self._seed, self._now = drop, seed, 0

    def before_step(self, step: int, total: int) -> None:
        """Draw how many blocks do without; the same for all branches and ranks."""
        integers = generator(self._seed, purpose="adapter drop", step=step).integers(self._drop + 1)
        self._now = int(integers)

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        without = self._now if self.training else self._drop
        return out if self.layer < without else super().forward(x, out)


class SharedFactors(nn.Module):
    """The first factors of composed matrices, the same in every layer.

    Args:
        n: how many, and their size.
    """

    def __init__(self, n: int, seed: int) -> None:
        super().__init__()
        self.n = n
        self.down = nn.Parameter(drawn((n, n, n), n**-0.5, seed, "compacter down"))
        self.up = nn.Parameter(drawn((n, n, n), n**-0.5, seed, "compacter up"))


class ComposedBottleneck(Bottleneck):
    """One whose matrices are sums of Kronecker products.

    Args:
        rules: the first factors.
        rank: of the second factors.
    """

    def __init__(
        self, branch: BlockBranch, bottleneck: int, rules: SharedFactors, rank: int, *, seed: int
    ) -> None:
        super().__init__(branch, bottleneck, seed=seed)
        del self.down, self.up
        self._rules = [rules]  # a plain list: they are no parameters of this layer
        n, width = rules.n, branch.width
        name = branch.name
        self.down_s = nn.Parameter(drawn((n, bottleneck // n, rank), 1.0, seed, f"{name}.s"))
        self.down_t = nn.Parameter(
            drawn((n, rank, width // n), (width * rank) ** -0.5, seed, f"{name}.t")
        )
        self.up_s = nn.Parameter(torch.zeros(n, width // n, rank))
        self.up_t = nn.Parameter(
            drawn((n, rank, bottleneck // n), bottleneck**-0.5, seed, f"{name}.u")
        )

    def matrices(self) -> tuple[Tensor, Tensor]:
        rules = self._rules[0]
        return (
            composed(rules.down, self.down_s @ self.down_t),
            composed(rules.up, self.up_s @ self.up_t),
        )


def composed(rule: Tensor, factors: Tensor) -> Tensor:
    """sum_i rule_i kron factors_i."""
    product = torch.einsum("nab,ncd->acbd", rule, factors)
    a, c, b, d = product.shape
    return product.reshape(a * c, b * d)
