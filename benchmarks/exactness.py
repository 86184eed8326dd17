"""What must be equal: resumed losses, losses over ranks, logits of Hugging Face's models.

Usage: python benchmarks/exactness.py
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import Row, record

from shoal.core.errors import RankError
from shoal.core.meter import read_events
from shoal.ir import TrainJob
from shoal.machine.described import load
from shoal.train.run import execute, plan_job

STEPS = 24


def losses(run: Path) -> dict[int, float]:
    """Step -> loss; the last time a step was done counts."""
    return {e["step"]: e["loss"] for e in read_events(run / "events.jsonl") if e["kind"] == "step"}


def run(folder: Path, ranks: int, precision: str, fatal: int | None, resume: bool) -> None:
    """Train, and kill the last rank with SIGKILL after step ``fatal``."""
    job = TrainJob.model_validate(
        {
            "model": "shoal-1m",
            "steps": STEPS,
            "seq_len": 64,
            "global_batch": 8,
            "precision": precision,
            "threads": 1,
            "parallel": {"dp": ranks},
            "shard": "replicated",
            "checkpoint": {"every": 4},
            "evaluation": {"every": 0, "final": False},
        }
    )

    def inject(supervisor: Any, event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == fatal:
            os.kill(supervisor.processes[-1].pid, signal.SIGKILL)

    try:
        execute(plan_job(job, load("laptop")), folder, resume=resume, inject=inject)
    except RankError:
        if fatal is None:
            raise


def resumed(folder: Path) -> Row:
    """Kill -9 at random steps; the share of losses that are bit-equal in the end."""
    equal = total = 0
    draw = random.Random(20)
    for precision in ("fp32", "bf16"):
        run(folder / f"straight-{precision}", 2, precision, None, False)
        fatal = draw.randrange(5, STEPS - 2)
        killed = folder / f"killed-{precision}"
        run(killed, 2, precision, fatal, False)
        run(killed, 2, precision, None, True)
        expected, result = losses(folder / f"straight-{precision}"), losses(killed)
        equal += sum(result[step] == loss for step, loss in expected.items())
        total += len(expected)
    return Row(
        name="losses bit-equal after kill -9 and resume",
        value=equal / total,
        unit="",
        comparison=">=",
        threshold=1.0,
        note=f"{total} losses of 2 ranks, fp32 and bf16, killed at a random step each",
    )


def over_ranks(folder: Path) -> Row:
    """Ranks 1, then 2, then 1 again, each resumed, against one rank all along."""
    run(folder / "one", 1, "fp32", None, False)
    changing = folder / "changing"
    run(changing, 1, "fp32", 9, False)
    run(changing, 2, "fp32", 17, True)
    run(changing, 1, "fp32", None, True)
    expected, result = losses(folder / "one"), losses(changing)
    worst = max(abs(result[step] / loss - 1) for step, loss in expected.items())
    return Row(
        name="largest relative difference of losses, 1 to 2 to 1 ranks",
        value=worst,
        unit="",
        comparison="<=",
        threshold=2e-5,
        note=f"fp32, {STEPS} steps, killed and resumed twice with another number of ranks",
    )


def parity(folder: Path) -> list[Row]:
    """Logits and greedy tokens against transformers, both ways, for four families."""
    import transformers as hf

    from shoal.model.generate import generate
    from shoal.model.huggingface import read, write

    common = {
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    families = {
        "llama": (hf.LlamaConfig, {}),
        "qwen2": (hf.Qwen2Config, {}),
        "qwen3": (hf.Qwen3Config, {"head_dim": 16}),
        "mixtral": (hf.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    }
    worst, same, total = 0.0, 0, 0
    for name, (config, more) in families.items():
        torch.manual_seed(0)
        peer = hf.AutoModelForCausalLM.from_config(config(**common, **more)).float().eval()
        peer.save_pretrained(folder / name)
        ours = read(folder / name, dtype=torch.float32).eval()
        write(folder / f"{name}-back", ours, None)
        back = hf.AutoModelForCausalLM.from_pretrained(folder / f"{name}-back").float().eval()
        tokens = torch.randint(0, 257, (2, 48))
        with torch.no_grad():
            expected = peer(tokens).logits
            for result in (ours(tokens), back(tokens).logits):
                worst = max(worst, float((result - expected).abs().max()))
            prompt = tokens[:1, :9]
            greedy = peer.generate(prompt, max_new_tokens=64, do_sample=False)[0, 9:].tolist()
            same += generate(ours, prompt[0].tolist(), 64) == greedy
        total += 1
    return [
        Row(
            name="largest difference of logits against transformers",
            value=worst,
            unit="",
            comparison="<=",
            threshold=1e-4,
            note=f"{', '.join(families)}; fp32, random weights with a range of 0.1, both ways",
        ),
        Row(
            name="families with the same 64 greedy tokens as transformers",
            value=float(same),
            unit="of 4",
            comparison=">=",
            threshold=float(total),
            note=", ".join(families),
        ),
    ]


def main() -> None:
    """Run and record."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["SHOAL_HOME"] = str(Path(place) / "home")
        record([resumed(Path(place)), over_ranks(Path(place)), *parity(Path(place))])


if __name__ == "__main__":
    main()
