"""A side network at work: rungs from every block, and one way back.

Shapes: D hidden, S width of the side stream, L blocks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.model.transformer import Transformer
from shoal.train.peft.run.low_rank import drawn

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle


class SideNetwork(nn.Module):
    """The side stream h: h = m h + (1 - m) rung(x), then h = h + block(h), for every block."""

    def __init__(self, hidden: int, layers: int, width: int, seed: int) -> None:
        super().__init__()

        def new(shape: tuple[int, ...], name: str) -> nn.Parameter:
            return nn.Parameter(drawn(shape, shape[-1] ** -0.5, seed, f"ladder {name}"))

        self.first = new((width, hidden), "first")
        self.rungs = nn.ParameterList(new((width, hidden), f"rung {n}") for n in range(layers))
        self.mix = nn.Parameter(torch.zeros(layers))
        self.wide = nn.ParameterList(new((4 * width, width), f"wide {n}") for n in range(layers))
        self.wide_bias = nn.Parameter(torch.zeros(layers, 4 * width))
        self.narrow = nn.ParameterList(
            nn.Parameter(torch.zeros(width, 4 * width)) for _ in range(layers)
        )
        self.narrow_bias = nn.Parameter(torch.zeros(layers, width))
        self.back = nn.Parameter(torch.zeros(hidden, width))
        self._stream: Tensor | None = None

    def begin(self, x: Tensor) -> None:
        """Start the stream with what enters the first block."""
        self._stream = F.linear(self._normal(x), self.first)

    def rung(self, layer: int, x: Tensor) -> None:
        """Take in what a block has made."""
        assert self._stream is not None
        share = torch.sigmoid(self.mix[layer])
        taken = F.linear(self._normal(x), self.rungs[layer])
        h = share * self._stream + (1 - share) * taken
        inner = F.gelu(F.linear(h, self.wide[layer], self.wide_bias[layer]))
        self._stream = h + F.linear(inner, self.narrow[layer], self.narrow_bias[layer])

    def end(self, x: Tensor) -> Tensor:
        """What the last block has made, with what the stream adds."""
        assert self._stream is not None
        stream, self._stream = self._stream, None
        return x + F.linear(stream, self.back).to(x.dtype)

    def _normal(self, x: Tensor) -> Tensor:
        """The base's stream, of one size and without its graph."""
        plain = x.detach().to(self.first.dtype)
        return plain * torch.rsqrt(plain.square().mean(-1, keepdim=True) + 1e-6)


def _blocks(model: nn.Module) -> nn.ModuleList:
    """The blocks of a model: the longest list of modules it has."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    if not lists:
        raise ConfigError("finetune.ladder: the model has no list of blocks to put rungs on")
    return max(lists, key=len)


def beside(handle: ModelPeftHandle, width: int, seed: int) -> None:
    """Put a side network beside the blocks of a model."""
    model = handle.model
    blocks = model.blocks if isinstance(model, Transformer) else _blocks(model)
    config: Any = model.config
    hidden = config.hidden if isinstance(model, Transformer) else config.hidden_size
    side = SideNetwork(hidden, len(blocks), width, seed)
    handle.attach("", "finetuned_side", side, "side")
    last = len(blocks) - 1

    def begun(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        side.begin(args[0] if args else kwargs["hidden_states"])

    def made(layer: int, _: nn.Module, args: Any, out: Any) -> Any:
        x = out[0] if isinstance(out, tuple) else out
        side.rung(layer, x)
        if layer < last:
            return None
        added = side.end(x)
        return (added, *out[1:]) if isinstance(out, tuple) else added

    handle.later(blocks[0].register_forward_pre_hook(begun, with_kwargs=True).remove)
    for layer, block in enumerate(blocks):
        handle.later(block.register_forward_hook(partial(made, layer)).remove)
