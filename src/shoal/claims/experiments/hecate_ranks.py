"""What the claim of Hecate runs: a training that is recorded, ranks that gather, steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal.claims.experiments.tiny import apart, mixture
from shoal.claims.frame import wire_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.claims.lab.thread_ranks import ThreadComm
    from shoal.plan.placement.protocols import Ints

__all__ = ["CopiedRun", "copied", "errors", "recorded"]

_EXPERTS, _TOP_K = 8, 2
_RANKS, _PER_NODE, _TOKENS, _STEPS = 4, 2, 64, 6

SPLITS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 4},
    {"dp": 2, "tp": 2, "sp": True, "ep": 4},
    {"dp": 2, "cp": 2, "ep": 4},
)


def recorded(steps: int, devices: int, seed: int) -> Ints:
    """Train a small mixture without a balancing loss; rows [S, L, D, E] that it routes.

    Args:
        steps: of the training.
        devices: among which the sequences of a batch are distributed.
        seed: of weights and batches.
    """
    import torch

    from shoal.claims.experiments.arch_training import Recipe, mini, text, train
    from shoal.model.feedforward import Experts
    from shoal.train import zoo

    config = mini(64, 2, ffn=64, family="mixtral", num_experts=_EXPERTS, top_k=_TOP_K)
    model = zoo.random(config, seed)
    rows: list[Ints] = []

    def note(module: Any, given: Any, logits_NE: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        chosen = torch.topk(logits_NE.detach(), _TOP_K, dim=-1).indices.flatten()
        source = torch.arange(len(chosen)) * devices // len(chosen)
        flat = torch.bincount(source * _EXPERTS + chosen, minlength=devices * _EXPERTS)
        rows.append(flat.view(devices, _EXPERTS).numpy())

    routers = [module.router for module in model.modules() if isinstance(module, Experts)]
    hooks = [router.register_forward_hook(note) for router in routers]
    train(model, text().train, Recipe(steps=steps, batch=2 * devices, length=128), seed)
    for hook in hooks:
        hook.remove()
    return np.stack(rows).reshape(steps, len(hooks), devices, _EXPERTS)


class CopiedRun(NamedTuple):
    """What four ranks on two nodes borrowed.

    Args:
        borrowed: experts that a rank had beside its own, most of all steps.
        counted: bytes that the table says.
        uncounted: bytes beside these.
    """

    borrowed: tuple[int, ...]
    counted: float
    uncounted: float


def copied(placer: Any, seed: int) -> CopiedRun:
    """Route on four ranks for some steps, some experts far more popular than others."""
    import torch

    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.core.meter import Meter
    from shoal.core.parts import Choice
    from shoal.ir import Parallel
    from shoal.ir.hooks import TrainStep
    from shoal.model.routing import StepRouting
    from shoal.parallel.comm.ranks import ranks_of
    from shoal.parallel.expert.balance import Routers
    from shoal.parallel.expert.copies import copies_of, sent_copies
    from shoal.parallel.expert.fssdp import CopiedExperts, dispatched
    from shoal.parallel.expert.layer_copies import TAG

    config = mixture(32, 1, _EXPERTS, 16)
    source = torch.Generator().manual_seed(seed)
    x_SRND = torch.randn(_STEPS, _RANKS, _TOKENS, config.hidden, generator=source) + 0.5
    router = torch.randn(_EXPERTS, config.hidden, generator=source)
    choice, meter = Choice.model_validate(placer), Meter()

    def on(comm: ThreadComm) -> tuple[int, float]:
        ranks = ranks_of(comm, Parallel(dp=_RANKS, ep=_RANKS)).experts
        assert ranks is not None
        layer = dispatched(config, ranks, 0, choice)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
            layer.router.weight.copy_(router)
        most, said, place = 0, 0.0, torch.arange(_TOKENS)
        routers = Routers(layer, 1, _EXPERTS, _RANKS, comm)
        size = sum(p[0].numel() * 4 for p in (layer.gate_up_proj, layer.down_proj))
        for step, x_RND in enumerate(x_SRND):
            if isinstance(layer, CopiedExperts):
                own = copies_of(layer.owner_E, layer.held, layer.devices, comm.rank)
                most = max(most, own.count)
                # There, and gradients back; each is counted where it is sent.
                travels = sent_copies(layer.owner_E, layer.held, layer.devices)
                said += 2 * size * len(travels) / _RANKS
            of = StepRouting(seed, step, comm.rank, _RANKS)
            tokens = of.over(place, _TOKENS, 1, training=True)
            torch.autograd.backward(layer(x_RND[comm.rank], tokens=tokens).sum())
            routers.finish()
            routers.published(TrainStep(step, _STEPS))
        return most, said

    ranks = run_ranks(_RANKS, on, meter=meter, ranks_per_node=_PER_NODE)
    wire = wire_bytes(meter.totals(), TAG)
    counted = sum(said for _, said in ranks)
    return CopiedRun(tuple(most for most, _ in ranks), counted, abs(wire - counted))


def errors(placer: Any, *, quick: bool) -> tuple[float, ...]:
    """Largest relative difference to one process after steps with copies, in float64."""
    config = mixture(32, 2, 4, 16)
    splits = SPLITS[: 1 if quick else None]
    return tuple(apart({**split, "placer": placer}, config, steps=3) for split in splits)
