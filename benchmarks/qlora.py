"""A step of QLoRA: by the 4-bit kernel and by tiles, against making each weight whole.

Usage: python benchmarks/qlora.py [--width N] [--layers N] [--rows N] [--pairs N]

Both ways train the same adapter on the same four-bit base, step by step in turn in one process;
"whole" makes a layer's matrix in fp32 for each product, forward and backward. Memory is the most
that the passes of a step allocate at one time. LoRA on the plain base runs beside them.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial

import torch
from common import Row, record, require_quiet
from torch import Tensor

from shoal.core.measure import interleave
from shoal.core.parts import table
from shoal.model.config import ModelConfig
from shoal.train.peft.arenas import Arenas
from shoal.train.peft.run.nf4 import NF4Linear, dequantise
from shoal.train.zoo import random


class Whole(NF4Linear):
    """The weight is made whole for each product."""

    def dense(self) -> Tensor:
        """In fp32."""
        packed = {name: getattr(self, name) for name in ("codes", "scales", "steps", "mean")}
        return dequantise(packed, (self.out_features, self.in_features))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """With the whole weight."""
        return torch.nn.functional.linear(x, self.dense().to(x.dtype), bias)

    def back(self, grad: Tensor) -> Tensor:
        """With the whole weight."""
        return grad @ self.dense().to(grad.dtype)


class Tuning:
    """One way to train.

    Args:
        model: the base.
        name: of the method.
        rows: a batch [B, T + 1].
        dtype: of the passes.
        whole: make whole weights.
    """

    def __init__(
        self, model: torch.nn.Module, name: str, rows: Tensor, dtype: torch.dtype, *, whole: bool
    ) -> None:
        self.model = copy.deepcopy(model)
        handle = table("peft").build({"name": name, "r": 8}).inject(self.model)
        handle.stay()
        for module in self.model.modules():
            if whole and isinstance(module, NF4Linear):
                module.__class__ = Whole
        trained = list(handle.trainable().values())
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)
        self.arenas = Arenas(self.model, handle)
        self.rows, self.dtype = rows, dtype

    def passes(self) -> None:
        """Forward and backward."""
        bf16 = self.dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = self.model.loss_sum(self.rows[:, :-1], self.rows[:, 1:])  # type: ignore[operator]
        torch.autograd.backward(loss)

    def step(self) -> None:
        """A whole step."""
        self.optimizer.zero_grad(set_to_none=False)
        self.passes()
        self.optimizer.step()

    def memory(self) -> dict[str, float]:
        """MiB by arena."""
        with self.arenas.passes():
            self.passes()
        result = self.arenas.bytes({})
        return {name: result[name] / 2**20 for name in ("base", "activations")}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("width", 1024), ("layers", 3), ("rows", 512), ("pairs", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    require_quiet()
    torch.set_num_threads(1)
    width = options.width
    config = ModelConfig(
        vocab_size=1024,
        hidden=width,
        num_layers=options.layers,
        num_heads=width // 64,
        num_kv_heads=width // 64,
        head_dim=64,
        ffn_hidden=3 * width,
        max_position=128,
    )
    model = random(config)
    rows = torch.randint(0, 1024, (options.rows // 128, 129))
    judged = []
    for dtype in (torch.bfloat16, torch.float32):
        ways = {
            "kernel and tiles": Tuning(model, "qlora", rows, dtype, whole=False),
            "whole weights": Tuning(model, "qlora", rows, dtype, whole=True),
            "lora, plain base": Tuning(model, "lora", rows, dtype, whole=False),
        }
        steps: dict[str, Callable[[], object]] = {
            name: partial(Tuning.step, way) for name, way in ways.items()
        }
        paired = interleave(steps, options.pairs, warmup=1)
        result = {name: way.memory() for name, way in ways.items()}
        short = str(dtype).removeprefix("torch.")
        fields = {n: f"{1e3 * sorted(s)[len(s) // 2]:.0f} ms" for n, s in paired.seconds.items()}
        print(short, fields, result)
        ratio = paired.ratio("whole weights", "kernel and tiles")
        new, old = result["kernel and tiles"], result["whole weights"]
        judged += [
            Row(
                name=f"QLoRA step, {short}: whole weights over kernel and tiles",
                value=ratio.value,
                low=ratio.low,
                high=ratio.high,
                unit="x",
                comparison=">=",
                threshold=1.0,
                samples={name: list(paired.seconds[name]) for name in ways},
                note=f"{config.num_layers} layers of {width}, {options.rows} tokens, one thread; "
                + ", ".join(f"{name} {time}" for name, time in fields.items()),
            ),
            Row(
                name=f"QLoRA passes, {short}: memory over that of whole weights",
                value=(new["base"] + new["activations"]) / (old["base"] + old["activations"]),
                unit="x",
                comparison="<=",
                threshold=1.0,
                note=f"base and passes: {new['base']:.0f} + {new['activations']:.0f} MiB against "
                f"{old['base']:.0f} + {old['activations']:.0f} MiB; LoRA on the plain base "
                f"{result['lora, plain base']['base']:.0f} + "
                f"{result['lora, plain base']['activations']:.0f} MiB",
            ),
        ]
    record(judged)


if __name__ == "__main__":
    main()
