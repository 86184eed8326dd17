"""What the ranks of claim [120] do: one layer of BERT, and every byte that it keeps.

Shapes: B sequences, n tokens of one rank, H hidden, A heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.claims.bench.attention.memory import SavedBytes
from shoal.claims.lab.projected import projected_attention
from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.parts import table
from shoal.ir.mask import Mask
from shoal.parallel.tensor.linear import ColumnLinear, RowLinear, WholeLinear

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal["sequence", "tensor", "projected", "ring"]
PARTS = ("attention", "mlp", "norms")


class Shape(NamedTuple):
    """A layer and what goes through it; ``rows``: of projected keys and values."""

    hidden: int
    heads: int
    length: int
    batch: int = 1
    rows: int = 64


class RankBytes(NamedTuple):
    """Bytes of the rank that has most, by part of the layer."""

    states: dict[str, float]
    activations: dict[str, float]

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.states.values()) + sum(self.activations.values())


class BertLayer(nn.Module):
    """Attention, MLP with GELU, and a norm after each residual sum: BERT without dropout.

    Kind ``tensor`` divides heads and the MLP's width; ``sequence`` the tokens, with RSA;
    ``projected`` also projects keys and values to a few rows; ``ring`` keeps no rows of scores.
    """

    def __init__(self, shape: Shape, kind: Kind, comm: ThreadComm) -> None:
        super().__init__()
        self.shape, self.kind, self.comm = shape, kind, comm
        hidden, world = shape.hidden, comm.world
        share = world if kind == "tensor" else 1
        self.heads = shape.heads // share
        into, out = (ColumnLinear, RowLinear) if kind == "tensor" else (WholeLinear, WholeLinear)
        alone = comm.split([[rank] for rank in range(world)])
        self.group = alone if kind == "tensor" else comm
        self.qkv = into.of(nn.Linear(hidden, 3 * hidden // share), comm)
        self.out = out.of(nn.Linear(hidden // share, hidden), comm)
        self.norm1 = nn.LayerNorm(hidden)
        self.fc1 = into.of(nn.Linear(hidden, 4 * hidden // share), comm)
        self.fc2 = out.of(nn.Linear(4 * hidden // share, hidden), comm)
        self.norm2 = nn.LayerNorm(hidden)
        if kind == "projected":
            columns = (shape.rows, shape.length // world)
            self.key_map = nn.Parameter(torch.full(columns, shape.length**-0.5))
            self.value_map = nn.Parameter(torch.full(columns, shape.length**-0.5))

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by part of the layer."""
        parts: dict[str, list[nn.Parameter]] = {name: [] for name in PARTS}
        for name, parameter in self.named_parameters():
            module = name.split(".")[0]
            part = {"fc1": "mlp", "fc2": "mlp", "norm1": "norms", "norm2": "norms"}
            parts[part.get(module, "attention")].append(parameter)
        return parts

    def attend(self, x_BnH: Tensor) -> Tensor:
        """[B, n, H]."""
        batch, tokens, hidden = x_BnH.shape
        qkv = self.qkv(x_BnH.view(-1, hidden)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.kind == "projected":
            mixed = projected_attention(q, k, v, self.key_map, self.value_map, self.comm)
        else:
            # Tensor parallelism keeps whole rows of its heads' scores: RSA of one rank.
            part = table("context").build("ring" if self.kind == "ring" else "rsa")
            mixed = part.attend(q, k, v, [Mask.full(self.shape.length)], self.group)
        rows = mixed.transpose(1, 2).reshape(batch * tokens, -1)
        out: Tensor = self.out(rows)
        return out.view(batch, tokens, hidden)

    def feed(self, x_BnH: Tensor) -> Tensor:
        """[B, n, H]."""
        rows = x_BnH.view(-1, x_BnH.shape[-1])
        out: Tensor = self.fc2(F.gelu(self.fc1(rows)))
        return out.view(x_BnH.shape)

    def count(self, x_BnH: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Output [B, n, H], and bytes that were saved on the way, by part."""
        saved, nbytes = SavedBytes(self.parameters()), dict.fromkeys(PARTS, 0.0)

        def through(part: str, function: Callable[..., Tensor], *xs: Tensor) -> Tensor:
            before = saved.bytes
            with saved:
                out = function(*xs)
            nbytes[part] += saved.bytes - before
            return out

        mixed = through("attention", self.attend, x_BnH)
        middle = through("norms", lambda x: self.norm1(x + mixed), x_BnH)
        fed = through("mlp", self.feed, middle)
        return through("norms", lambda x: self.norm2(x + fed), middle), nbytes


def count(shape: Shape, kind: Kind, world: int, *, train: bool = True) -> RankBytes:
    """Run the layer on threads and count; with ``train`` the state after a step of AdamW, too."""

    def rank(comm: ThreadComm) -> RankBytes:
        layer = BertLayer(shape, kind, comm)
        tokens = shape.length if kind == "tensor" else shape.length // world
        out, saved = layer.count(torch.ones(shape.batch, tokens, shape.hidden))
        if not train:
            return RankBytes(dict.fromkeys(PARTS, 0.0), saved)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
        torch.autograd.backward(out, torch.ones_like(out))
        optimizer.step()
        states = {
            name: float(
                sum(
                    x.nbytes
                    for p in parameters
                    for x in (p, p.grad, *optimizer.state[p].values())
                    if isinstance(x, Tensor)
                )
            )
            for name, parameters in layer.parts().items()
        }
        return RankBytes(states, saved)

    return max(run_ranks(world, rank, timeout_s=300.0), key=lambda found: found.total)
