"""Training speed: against a bare PyTorch loop, against Hugging Face's Trainer, over ranks.

Usage: python benchmarks/training.py [--rounds N] [--only loop|ranks]

All ratios are of one run: methods take turns, a few steps each, and are compared by the
median of the ratios within each round.
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

from shoal.core.measure import bootstrap
from shoal.core.meter import Meter
from shoal.corpora.tokens import prepare
from shoal.cost.shapes import find
from shoal.ir import TrainJob
from shoal.model.config import ModelConfig
from shoal.model.initialise import init_weights
from shoal.model.transformer import Transformer
from shoal.parallel.comm.collectives import TorchComm
from shoal.train.allocator import keep_freed_memory
from shoal.train.build import weights_of
from shoal.train.loop import RankTrainer

MODEL = "shoal-4m"
BATCH, LENGTH = 16, 256
STEPS = 4


def job(**changes: object) -> TrainJob:
    """The benchmark's job; every method trains what it says."""
    return TrainJob.model_validate(
        {
            "model": MODEL,
            "steps": 10_000,
            "seq_len": LENGTH,
            "global_batch": BATCH,
            "optimizer": "adamw",
            "precision": "bf16",
            **changes,
        }
    )


def model() -> Transformer:
    """The model, initialised."""
    made = Transformer(ModelConfig.from_shape(find(MODEL)))
    init_weights(made, 0)
    return made.train()


def shoal_steps() -> Callable[[int], list[float]]:
    """Our loop on one rank."""
    comm = TorchComm(Meter([]))
    trainer = RankTrainer(
        job(), 10_000, weights_of(job()), prepare("stdlib", vocab_size=4096), comm
    )
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


def bare_steps() -> Callable[[int], list[float]]:
    """The shortest PyTorch loop that trains the same model on the same tokens."""
    net = model()
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    split = prepare("stdlib", vocab_size=4096).train
    tokens = np.empty(2**20, dtype=np.int64)
    split.read(0, tokens)
    data = torch.from_numpy(tokens)
    generator = torch.Generator().manual_seed(0)

    def run(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH,), generator=generator)
            rows = torch.stack([data[s : s + LENGTH + 1] for s in starts.tolist()])
            with torch.autocast("cpu", torch.bfloat16):
                loss = net.loss_sum(rows[:, :-1], rows[:, 1:]) / (BATCH * LENGTH)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
            seconds.append(time.perf_counter() - begin)
        return seconds

    return run


def trainer_steps(folder: Path) -> Callable[[int], list[float]]:
    """Hugging Face's Trainer on its own Llama of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
    from transformers import Trainer as HuggingFaceTrainer

    shape = find(MODEL)
    config = LlamaConfig(
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
    net = LlamaForCausalLM(config)
    split = prepare("stdlib", vocab_size=4096).train
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
            per_device_train_batch_size=BATCH,
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


def against_peers(rounds: int) -> list[Row]:
    """Our loop, a bare loop and Hugging Face's Trainer, taking turns."""
    torch.set_num_threads(os.cpu_count() or 1)
    # For every method alike: they share this process.
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        methods = {
            "shoal": shoal_steps(),
            "bare loop": bare_steps(),
            "Trainer": trainer_steps(Path(folder)),
        }
        for run in methods.values():
            run(3)
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        names = list(methods)
        for number in range(rounds):
            for name in names[number % 3 :] + names[: number % 3]:
                seconds[name].append(statistics.median(methods[name](STEPS)))
    tokens = BATCH * LENGTH
    rows = []
    for peer, threshold in (("bare loop", 0.97), ("Trainer", 1.0)):
        ratio = bootstrap(np.divide(seconds[peer], seconds["shoal"]))
        rows.append(
            Row(
                name=f"training tokens/s against {peer}",
                value=ratio.value,
                low=ratio.low,
                high=ratio.high,
                unit="x",
                comparison=">=",
                threshold=threshold,
                note=f"{MODEL}, {BATCH} x {LENGTH} tokens, bf16, AdamW, one process, "
                f"{torch.get_num_threads()} threads; shoal "
                f"{tokens / statistics.median(seconds['shoal']):,.0f} tokens/s, {peer} "
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
            note=f"{MODEL}, {BATCH} x {LENGTH} tokens a step in all, bf16, one thread a rank, "
            f"replicated; one rank {1e3 * statistics.median(seconds[1]):.0f} ms, two "
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
        rows += against_peers(options.rounds)
    if options.only != "loop":
        rows += over_ranks(max(3, options.rounds // 2))
    record(rows)
    print(json.dumps([row.note for row in rows], indent=1))


if __name__ == "__main__":
    main()
