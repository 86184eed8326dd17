"""Forward and backward of the demo model beside transformers' Llama of the same shape.

Both run one thread, bf16 autocast, 8 x 256 tokens, in turns; printed are medians and the
median of paired ratios.

    python benchmarks/transformer_step.py [--pairs 15] [--model shoal-4m] [--fp32]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM

from shoal.model import huggingface
from shoal.train import zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--model", default="shoal-4m")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--fp32", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours = zoo.random(args.model)
    with tempfile.TemporaryDirectory() as home:
        huggingface.write(Path(home) / "m", ours)
        theirs = AutoModelForCausalLM.from_pretrained(
            Path(home) / "m", dtype=torch.float32, attn_implementation="sdpa"
        )
    theirs.train()
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, ours.config.vocab_size, (args.batch, args.seq_len + 1), generator=source)
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step_ours() -> float:
        ours.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=not args.fp32):
            loss = ours.loss_sum(tokens, targets) / targets.numel()
        loss.backward()
        return loss.item()

    def step_theirs() -> float:
        theirs.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=not args.fp32):
            loss = theirs(tokens, labels=tokens, shift_labels=targets).loss
        loss.backward()
        return loss.item()

    print(f"loss  ours {step_ours():.4f}  transformers {step_theirs():.4f}")
    times: list[tuple[float, float]] = []
    for _ in range(args.pairs):
        start = time.perf_counter()
        step_ours()
        middle = time.perf_counter()
        step_theirs()
        times.append((middle - start, time.perf_counter() - middle))
    first, second = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    print(f"ms    ours {first:.1f}  transformers {second:.1f}  speed-up {ratio:.2f}")


if __name__ == "__main__":
    main()
