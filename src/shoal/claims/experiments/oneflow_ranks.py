"""What the ranks of the claim ``oneflow`` run: a block by a plan, and by DTensor's propagation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.claims.frame import wire_bytes
from shoal.claims.lab.placed.placement import RankMesh, execute
from shoal.parallel.placed.trace import TracedGraph, trace

if TYPE_CHECKING:
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.plan.sbp.search import SbpPlan

WIDTH, HEADS, TOKENS = 128, 8, (2, 8)


class Mlp(nn.Module):
    """Two layers around a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class ProductAttention(nn.Module):
    """Attention written out in products: DTensor propagates no fused one on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        b, t, _ = x.shape
        d = WIDTH // HEADS
        heads = [
            layer(x).view(b, t, HEADS, d).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        q, k, v = heads
        weights = torch.softmax(q @ k.transpose(-1, -2) * d**-0.5, dim=-1)
        out: Tensor = self.down((weights @ v).transpose(1, 2).reshape(b, t, WIDTH))
        return out


BLOCKS: dict[str, type[nn.Module]] = {"mlp": Mlp, "attention": ProductAttention}


def traced(block: str) -> TracedGraph:
    """The graph of a block; its input is ``x``."""
    return trace(BLOCKS[block](), [torch.empty(*TOKENS, WIDTH, device="meta")])


class _Bytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that this rank sends in DTensor's collectives, by the ring's formulas."""

    def __init__(self, world: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.world = world
        self.sent = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if "c10d_functional" in name and not any(w in name for w in ("wait", "wrap")):
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            whole = max(tensor.nbytes, out.nbytes if isinstance(out, Tensor) else 0)
            passes = 2 if "all_reduce" in name else 1
            self.sent += passes * whole * (self.world - 1) / self.world
        return out


def compare(comm: TorchComm, block: str, plan: SbpPlan, seed: int) -> dict[str, Any]:
    """Run a block by a plan and by DTensor on the same numbers.

    Returns bytes that this rank sent: ``plan``, and ``dtensor`` by the dimension that its weights
    are sharded on; and the largest ``error`` against one process.
    """
    # Equal on every rank, which each draws for itself.
    torch.manual_seed(seed)
    module = BLOCKS[block]().double()
    x = torch.randn(*TOKENS, WIDTH, dtype=torch.float64).float()
    module = module.float()
    with torch.no_grad():
        wanted = module(x)
        graph = traced(block)
        before = wire_bytes(comm.meter.totals(), "boxing")
        result = execute(
            graph.graph,
            plan,
            RankMesh(comm, (comm.world,)),
            {"x": x, **dict(module.named_parameters())},
        )[graph.result]
        report: dict[str, Any] = {
            "plan": wire_bytes(comm.meter.totals(), "boxing") - before,
            "error": _error(result.local, wanted),
            "dtensor": {},
        }
        mesh = init_device_mesh("cpu", (comm.world,))
        for dim in (0, 1):
            for child in module.children():
                weight = child.weight
                assert isinstance(weight, Tensor)
                child.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(dim)]))
            replicated = distribute_tensor(x, mesh, [Replicate()])
            with _Bytes(comm.world) as counted:
                out = module(replicated).redistribute(placements=[Replicate()]).to_local()
            report["dtensor"][str(dim)] = counted.sent
            report["error"] = max(report["error"], _error(out, wanted))
            for child in module.children():
                weight = child.weight
                assert isinstance(weight, DTensor)
                child.weight = nn.Parameter(weight.full_tensor())
    return report


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())
