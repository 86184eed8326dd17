"""Sites: the linear layers of a model that methods change, each by the name that files give it.

In our transformer several of them are rows of one matrix: queries, keys and values lie under each
other, and so do gates and what they gate. :class:`AdaptedLinear` stands in the place of such a
matrix and lets the part of each site change its own rows.

Shapes: N rows of tokens, I inputs, O outputs of a site, R rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ConfigError, suggestion
from shoal.train.peft.base import matches

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer


@dataclass(frozen=True)
class Site:
    """A linear layer that may be changed.

    Args:
        name: as patterns and files call it.
        owner: path of the module that multiplies with it.
        start: its first row in the matrix of the module.
        stop: behind its last row.
        alone: it is the whole matrix.
    """

    name: str
    owner: str
    start: int
    stop: int
    columns: int
    alone: bool

    @property
    def rows(self) -> int:
        """Outputs."""
        return self.stop - self.start

    @property
    def leaf(self) -> str:
        """Last word of the name."""
        return self.name.rpartition(".")[2]


class SiteRows:
    """The rows of one site in the matrix that a module multiplies with."""

    def __init__(self, base: nn.Module, start: int, stop: int) -> None:
        self.base, self.start, self.stop = base, start, stop

    @property
    def weight(self) -> Tensor:
        """[O, I]; computed where the base is in few bits."""
        return dense(self.base)[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:
        """[O], or None."""
        bias = getattr(self.base, "bias", None)
        return None if bias is None else bias[self.start : self.stop]

    def linear(self, x: Tensor) -> Tensor:
        """The base's own product with other inputs."""
        return F.linear(x, self.weight, self.bias)


def dense(base: nn.Module) -> Tensor:
    """The matrix of a module [rows, columns]."""
    made = getattr(base, "dense", None)
    weight: Tensor = base.weight if made is None else made()  # type: ignore[assignment]
    return weight


def product(base: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """Product x W^T + b of a module in the type of x, by its own way where it has one."""
    made = getattr(base, "product", None)
    if made is not None:
        own: Tensor = made(x, bias)
        return own
    return F.linear(x, dense(base).to(x.dtype), bias)


def back(base: nn.Module, grad: Tensor) -> Tensor:
    """Product of a gradient and the matrix of a module, by its own way where it has one."""
    made = getattr(base, "back", None)
    tensor: Tensor = grad @ dense(base).to(grad.dtype) if made is None else made(grad)
    return tensor


class _Product(torch.autograd.Function):
    """x W^T + b, that keeps neither x nor W: the layer makes W again for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return product(layer, x, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return back(ctx.layer, grad), None, None


class FrozenLinear(nn.Module):
    """Base of linear layers that stand still and whose matrix is not there whole.

    Subclasses define ``dense``, the dequantized matrix, and may override ``product`` and ``back``.

    Args:
        linear: whose product it makes; its bias stays as it is.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.bias = linear.bias

    @abstractmethod
    def dense(self) -> Tensor:
        """The dequantized weight [O, I]."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with torch.autocast(kind, enabled=False):
            out: Tensor = _Product.apply(x, self, bias)  # type: ignore[no-untyped-call]
        return out


class SitePart(nn.Module):
    """What a method puts beside one site.

    Attributes:
        replaces: it replaces the site's output, so the base's output is not computed.
    """

    replaces = False

    @abstractmethod
    def forward(self, x: Tensor, out: Tensor, rows: SiteRows) -> Tensor:
        """The site's changed output.

        Args:
            x: inputs [..., I].
            out: the base's output [..., O]; empty for a part that replaces it.
            rows: the base.
        """

    @abstractmethod
    def merged(self, rows: SiteRows) -> tuple[Tensor, Tensor | None]:
        """Weight [O, I] and bias that give the same without this part."""

    def files(self) -> dict[str, Tensor]:
        """Name behind that of the site -> what is stored: parameters, and what was drawn."""
        return dict(self.named_parameters())


class AdaptedLinear(nn.Module):
    """A linear layer some rows of which methods change.

    Args:
        base: what it stands for; its weights stand still.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.parts = nn.ModuleDict()
        self._spans: dict[str, SiteRows] = {}
        self.merged = False
        self.out_features: int = base.out_features  # type: ignore[assignment]
        self.in_features: int = base.in_features  # type: ignore[assignment]
        self._fused: Callable[[Tensor], Tensor | None] | None = None

    @property
    def weight(self) -> Tensor:
        """The base's weight."""
        return dense(self.base)

    @property
    def bias(self) -> Tensor | None:
        """The base's bias."""
        bias: Tensor | None = getattr(self.base, "bias", None)
        return bias

    def put(self, site: Site, part: SitePart) -> None:
        """Change the rows of a site.

        Raises:
            ConfigError: a method changes them already.
        """
        if site.leaf in self.parts:
            raise ConfigError(
                f"finetune: {site.name} is already changed by a method; remove that one, or give "
                "a hybrid method such as unipelt or mam"
            )
        self.parts[site.leaf] = part
        self._spans[site.leaf] = SiteRows(self.base, site.start, site.stop)
        self._order()

    def rows(self, leaf: str) -> SiteRows:
        """The rows of a site."""
        return self._spans[leaf]

    def _order(self) -> None:
        from shoal.train.peft.run.low_rank import fused

        self._plan = sorted(
            ((self._spans[leaf], part) for leaf, part in self.parts.items()),
            key=lambda pair: pair[0].start,
        )
        self._fused = fused(self.base, self._plan)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., rows]."""
        if self.merged or not self.parts:
            plain: Tensor = self.base(x)
            return plain
        if self._fused is not None:
            fast = self._fused(x)
            if fast is not None:
                return fast
        alone = all(part.replaces for _, part in self._plan)
        out: Tensor = x.new_empty(0) if alone else self.base(x)

        def rest(start: int, stop: int) -> Tensor:
            return SiteRows(self.base, start, stop).linear(x) if alone else out[..., start:stop]

        pieces: list[Tensor] = []
        at = 0
        for rows, part in self._plan:
            if rows.start > at:
                pieces.append(rest(at, rows.start))
            pieces.append(part(x, out if alone else out[..., rows.start : rows.stop], rows))
            at = rows.stop
        if at < self.out_features:
            pieces.append(rest(at, self.out_features))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def all_sites(model: nn.Module) -> list[Site]:
    """Every linear layer of a model that a method may change, in the order of the model."""
    from shoal.model.transformer import Transformer

    if isinstance(model, Transformer):
        return _ours(model)
    sites = []
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            sites += [Site(name, name, 0, module.out_features, module.in_features, alone=True)]
        elif _is_linear(module) and not name.endswith(".base"):
            rows, columns = module.out_features, module.in_features
            sites.append(Site(name, name, 0, rows, columns, alone=True))
    return sites


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or hasattr(module, "dense")


def _ours(model: Transformer) -> list[Site]:
    from shoal.model import FAMILIES

    result = []
    for name, pieces in FAMILIES.build(model.config.family).names(model.config).items():
        owner, _, leaf = name.rpartition(".")
        if leaf != "weight" or not owner.startswith("blocks."):
            continue
        module: Any = model.get_submodule(owner)
        if not (_is_linear(module) or isinstance(module, AdaptedLinear)):
            continue
        at = 0
        for piece in pieces:
            stop = at + piece.shape[0]
            site = piece.name.removesuffix(".weight")
            result.append(Site(site, owner, at, stop, piece.shape[1], alone=len(pieces) == 1))
            at = stop
    return result


def find_sites(model: nn.Module, targets: str, where: str) -> list[Site]:
    """The sites that patterns match.

    Raises:
        ConfigError: none; the message names what there is.
    """
    every = all_sites(model)
    chosen = [site for site in every if matches(site.name, targets)]
    if not chosen:
        leaves = sorted({site.leaf for site in every})
        raise ConfigError(
            f"{where} = {targets!r}: matches no linear layer; there are *.{', *.'.join(leaves)}"
            + suggestion(targets.rpartition(".")[2], leaves)
        )
    return chosen
