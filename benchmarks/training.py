"""Training speed: against bare PyTorch loops, Hugging Face's Trainer, and over ranks.

Usage: python benchmarks/training.py [--rounds N] [--only loop|ranks]

A bare loop trains the same model on the same tokens: as it is, through ``torch.compile``, and with
transformers' Llama through ``torch.compile``. All ratios are of one run: methods take turns, a few
steps each, and are compared by the median of the ratios within each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from common import Row, record, require_quiet
from torch import Tensor, nn

from shoal.core.measure import bootstrap
from shoal.core.meter import Meter
from shoal.corpora.tokens import prepare
from shoal.cost.shapes import resolve
from shoal.ir import TrainJob
from shoal.ir.shape import ModelShape
from shoal.kernel.fused.choice import choose
from shoal.model.config import ModelConfig
from shoal.model.initialise import init_weights
from shoal.model.transformer import Transformer
from shoal.parallel.comm.collectives import TorchComm
from shoal.train.allocator import keep_freed_memory
from shoal.train.build import weights_of
from shoal.train.loop import RankTrainer

SMALL = "shoal-4m"
# 60 M parameters, a file beside the results of this run.
LARGE = """\
name: llama-60m
num_layers: 12
hidden: 640
num_heads: 10
num_kv_heads: 5
head_dim: 64
ffn_hidden: 1728
vocab_size: 8192
max_position: 2048
tied: true
"""
LENGTH, STEPS = 256, 4
BATCHES = {"4 M": 16, "60 M": 8}

Steps = Callable[[int], list[float]]


def job(model: str, batch: int, **changes: object) -> TrainJob:
    """The benchmark's job; every method trains what it says."""
    return TrainJob.model_validate(
        {
            "model": model,
            "steps": 10_000,
            "seq_len": LENGTH,
            "global_batch": batch,
            "optimizer": "adamw",
            "precision": "bf16",
            # What a plan takes where nothing is said.
            "kernel": choose({}, resolve(model), "bf16", rows=LENGTH * batch),
            **changes,
        }
    )


def shoal_steps(model: str, batch: int) -> Steps:
    """Our loop on one rank."""
    work, tokens = job(model, batch), prepare("stdlib", vocab_size=resolve(model).vocab_size)
    trainer = RankTrainer(work, 10_000, weights_of(work), tokens, TorchComm(Meter([])))
    state = {"step": 0}

    def run(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            trainer.step(state["step"])
            seconds.append(time.perf_counter() - begin)
            state["step"] += 1
        return seconds

    return run


def bare_steps(
    net: nn.Module, loss_of: Callable[[Tensor], Tensor], batch: int, vocab: int
) -> Steps:
    """The shortest PyTorch loop that trains a model on the same tokens."""
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    split = prepare("stdlib", vocab_size=vocab).train
    tokens = np.empty(2**20, dtype=np.int64)
    split.read(0, tokens)
    data = torch.from_numpy(tokens)
    generator = torch.Generator().manual_seed(0)

    def run(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            starts = torch.randint(0, len(data) - LENGTH - 1, (batch,), generator=generator)
            rows = torch.stack([data[s : s + LENGTH + 1] for s in starts.tolist()])
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(rows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
            seconds.append(time.perf_counter() - begin)
        return seconds

    return run


def own_steps(shape: ModelShape, batch: int, *, compiled: bool) -> Steps:
    """A bare loop around our model."""
    net = Transformer(ModelConfig.from_shape(shape))
    init_weights(net, 0)
    net.train()

    def loss_of(rows: Tensor) -> Tensor:
        return net.loss_sum(rows[:, :-1], rows[:, 1:]) / (batch * LENGTH)

    run = torch.compile(loss_of) if compiled else loss_of
    return bare_steps(net, run, batch, shape.vocab_size)


def llama(shape: ModelShape) -> nn.Module:
    """The Llama of transformers of that shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn_hidden,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            tie_word_embeddings=shape.tied,
            max_position_embeddings=shape.max_position,
            use_cache=False,
        )
    ).train()


def llama_steps(shape: ModelShape, batch: int) -> Steps:
    """A bare loop around transformers' model, compiled."""
    net = llama(shape)

    def loss_of(rows: Tensor) -> Tensor:
        return net(rows[:, :-1], labels=rows[:, :-1], shift_labels=rows[:, 1:].contiguous()).loss

    return bare_steps(net, torch.compile(loss_of), batch, shape.vocab_size)


def trainer_steps(shape: ModelShape, batch: int, folder: Path) -> Steps:
    """Hugging Face's Trainer on its own Llama of the same shape."""
    from transformers import Trainer as HuggingFaceTrainer
    from transformers import TrainerCallback, TrainingArguments

    net = llama(shape)
    split = prepare("stdlib", vocab_size=shape.vocab_size).train
    rows = np.empty(4096 * LENGTH, dtype=np.int64)
    split.read(0, rows)
    table = torch.from_numpy(rows.reshape(-1, LENGTH))
    dataset = [{"input_ids": row, "labels": row} for row in table]
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Notes when each step ends."""

        def on_step_end(self, *_: object, **__: object) -> None:
            times.append(time.perf_counter())

    def run(count: int) -> list[float]:
        times.clear()
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=count + 2,
            per_device_train_batch_size=batch,
            learning_rate=3e-3,
            adam_beta2=0.95,
            weight_decay=0.1,
            optim="adamw_torch_fused",
            bf16=True,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = HuggingFaceTrainer(
            model=net, args=arguments, train_dataset=dataset, callbacks=[Clock()]
        )
        trainer.train()
        # The first step pays for the loader and the optimizer's state.
        return np.diff(times)[1:].tolist()

    return run


def against_peers(size: str, model: str, rounds: int) -> list[Row]:
    """Our loop, bare loops and Hugging Face's Trainer, taking turns."""
    torch.set_num_threads(os.cpu_count() or 1)
    # For every method alike: they share this process.
    keep_freed_memory()
    shape, batch = resolve(model), BATCHES[size]
    with tempfile.TemporaryDirectory() as folder:
        methods = {
            "shoal": shoal_steps(model, batch),
            "bare loop": own_steps(shape, batch, compiled=False),
            "bare loop, compiled": own_steps(shape, batch, compiled=True),
            "bare loop with transformers' Llama, compiled": llama_steps(shape, batch),
            "Trainer": trainer_steps(shape, batch, Path(folder)),
        }
        for run in methods.values():
            run(3)
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        names = list(methods)
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                seconds[name].append(statistics.median(methods[name](STEPS)))
    tokens = batch * LENGTH
    thresholds = dict.fromkeys(names[1:], 1.1) | {"bare loop": 0.97, "Trainer": 1.0}
    rows = []
    for peer, threshold in thresholds.items():
        ratio = bootstrap(np.divide(seconds[peer], seconds["shoal"]))
        rows.append(
            Row(
                name=f"training {size}: tokens/s over {peer}",
                value=ratio.value,
                low=ratio.low,
                high=ratio.high,
                unit="x",
                comparison=">=",
                threshold=threshold,
                note=f"{batch} x {LENGTH} tokens, bf16, AdamW, one process, "
                f"{torch.get_num_threads()} threads; shoal "
                f"{tokens / statistics.median(seconds['shoal']):,.0f} tokens/s, peer "
                f"{tokens / statistics.median(seconds[peer]):,.0f}; {rounds} interleaved rounds "
                f"of {STEPS} steps",
                samples={"shoal_s": seconds["shoal"], "peer_s": seconds[peer]},
            )
        )
    return rows


def over_ranks(rounds: int) -> list[Row]:
    """One and two ranks of one thread each, taking turns as real runs."""
    from shoal.core.meter import read_events
    from shoal.machine.described import load
    from shoal.train.run import execute, plan_job

    seconds: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for ranks in (1, 2) if number % 2 else (2, 1):
                work = job(
                    SMALL,
                    BATCHES["4 M"],
                    steps=14,
                    threads=1,
                    parallel={"dp": ranks},
                    checkpoint={"every": 0},
                    evaluation={"every": 0, "final": False},
                )
                directory = Path(folder) / f"{ranks}-{number}"
                os.environ["SHOAL_HOME"] = str(Path(folder) / "home")
                execute(plan_job(work, load("laptop")), directory)
                steps = [e for e in read_events(directory / "events.jsonl") if e["kind"] == "step"]
                seconds[ranks].append(statistics.median(e["step_s"] for e in steps[4:]))
    ratio = bootstrap(np.divide(seconds[1], seconds[2]))
    return [
        Row(
            name="two ranks against one",
            value=ratio.value,
            low=ratio.low,
            high=ratio.high,
            unit="x",
            comparison=">=",
            threshold=1.7,
            note=f"{SMALL}, {BATCHES['4 M']} x {LENGTH} tokens a step in all, bf16, one thread a "
            f"rank, replicated; one rank {1e3 * statistics.median(seconds[1]):.0f} ms, two "
            f"{1e3 * statistics.median(seconds[2]):.0f} ms a step; {rounds} rounds in turn",
            samples={"one_rank_s": seconds[1], "two_ranks_s": seconds[2]},
        )
    ]


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["loop", "ranks"])
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    require_quiet()
    rows = []
    if options.only != "ranks":
        with tempfile.TemporaryDirectory() as folder:
            large = Path(folder) / "60m.yaml"
            large.write_text(LARGE)
            for size, model in (("4 M", SMALL), ("60 M", str(large))):
                rows += against_peers(size, model, options.rounds)
    if options.only != "loop":
        rows += over_ranks(max(3, options.rounds // 2))
    record(rows)
    print(json.dumps([row.note for row in rows], indent=1))


if __name__ == "__main__":
    main()
