"""What Shoal's training loop is compared with, and products in fp8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu.models import random_model
from gpu.place import Place
from gpu.timing import elapsed
from shoal.ir import TrainPlan
from shoal.train.build import weights_of


def to_fp8(model: Any) -> None:
    """Products of the blocks in fp8, scaled by tensor, in place."""
    from torchao.float8 import convert_to_float8_training

    def wanted(module: torch.nn.Module, name: str) -> bool:
        edges = (getattr(module, "in_features", 1), getattr(module, "out_features", 1))
        return "blocks" in name and all(edge % 16 == 0 for edge in edges)

    convert_to_float8_training(model, module_filter_fn=wanted)


def bare(place: Place, made: TrainPlan) -> Callable[[], float]:
    """The shortest PyTorch loop that trains the same model."""
    work = made.job
    net = random_model(weights_of(work).config, place.device).train()
    fused = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)
    shape = (work.global_batch, work.seq_len + 1)
    rows = torch.randint(0, net.config.vocab_size, shape, device=place.device)
    size = work.microbatch or work.global_batch
    loss_of: Any = net.loss_sum if place.dry else torch.compile(net.loss_sum)

    def step() -> None:
        for part in rows.split(size):
            with torch.autocast(place.device, torch.bfloat16):
                loss = loss_of(part[:, :-1], part[:, 1:], recompute=work.recompute == "full")
                loss = loss / (work.global_batch * work.seq_len)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        fused.step()
        fused.zero_grad(set_to_none=True)
        loss.item()

    return lambda: elapsed(place, step)
