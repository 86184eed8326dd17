"""Guesses beside plain decoding at several sizes of batch: are they off where they do not pay?

Usage: python benchmarks/decoding.py [--batch 1,2,4,8,16,32] [--methods medusa,ngram] [--rounds N]
[--prompts N] [--tokens N] [--dry]

The zoo's target and its drafters answer held-out prompts, so many together, in turn with plain
decoding by the same engine. What an engine that guesses may cost is five in a hundred, at any size
of batch: whatever is measured when it starts and whatever comes of its guesses must turn them off.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import RESULTS, Row, finish, require_quiet

from shoal.claims.bench.decode import PLAIN, Bench, compared, held_out_prompts, lively
from shoal.core.measure import num_cores
from shoal.train import zoo
from shoal.train.zoo.drafters import drafter

TABLE = RESULTS.parent / "serving" / "decoding.json"
TARGET, DRAFT = "shoal-27m", "shoal-draft-1m"
METHODS = ("medusa", "ppd", "ngram", "draft_model")
FLOOR = 0.95
PROMPT_TOKENS = 64


def part(name: str, target: Path) -> dict[str, Any]:
    """The part of kind speculative, with its trained drafter."""
    if name == "ngram":
        return {"name": name}
    place = zoo.trained(DRAFT, print) if name == "draft_model" else drafter(name, target, say=print)
    return {"name": name, "path": str(place)}


def main() -> None:
    """Measure, and put the table and the smallest ratio on file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="1,2,4,8,16,32")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    args = parser.parse_args()
    sizes = [int(one) for one in args.batch.split(",")]
    target = zoo.trained(TARGET, print)
    methods = {name: part(name, target) for name in args.methods.split(",")}
    prompts = held_out_prompts(target, zoo.corpus(TARGET), args.prompts, PROMPT_TOKENS)
    if not args.dry:
        require_quiet()
    bench = Bench(
        target,
        {PLAIN: None, **methods},
        threads=num_cores(),
        max_running=max(sizes),
        kv_tokens=max(8192, max(sizes) * (PROMPT_TOKENS + args.tokens + 64)),
    )
    kept = lively(bench, prompts, args.tokens)
    loops = len(prompts) - len(kept)
    results = []
    for size in sizes:
        # Larger batches are answered sooner, and less of a round is measured.
        rounds = args.rounds * min(4, 1 + size // 4)
        for row in compared(bench, kept, args.tokens, rounds=rounds, batch=size, loops=loops):
            print(
                f"{size:3} {row.method:12} {row.tokens_per_s:6.0f} tokens/s, {row.speedup:.3f} of "
                f"plain ({row.low:.3f} to {row.high:.3f}), {row.tokens_per_step:.2f} tokens a step"
            )
            results.append(row)
    guessing = [row for row in results if row.method != PLAIN]
    rows = [
        Row(
            name=f"speculation over plain decoding, least of {len(sizes)} sizes of batch: {name}",
            value=min(row.speedup for row in guessing if row.method == name),
            unit="x",
            comparison=">=",
            threshold=FLOOR,
            note=f"{TARGET} in bf16, {num_cores()} threads; "
            + ", ".join(
                f"{one.speedup:.2f} at {one.batch}" for one in guessing if one.method == name
            )
            + f"; {len(kept)} prompts of {PROMPT_TOKENS} tokens, answers of {args.tokens}, "
            f"{args.rounds} rounds in turn, and up to four times as many of larger batches; "
            f"{loops} looping answers left out",
            low=min(row.low for row in guessing if row.method == name),
            high=max(row.high for row in guessing if row.method == name),
        )
        for name in methods
    ]
    least = min(guessing, key=lambda row: row.speedup)
    rows.append(
        Row(
            name="speculation over plain decoding, least of all methods and sizes of batch",
            value=least.speedup,
            unit="x",
            comparison=">=",
            threshold=FLOOR,
            note=f"{least.method} with {least.batch} requests; rounds, prompts and drafters as of "
            "the methods alone",
            low=least.low,
            high=least.high,
        )
    )
    table = {
        "target": TARGET,
        "rounds": args.rounds,
        "answers": len(kept),
        "loops": loops,
        "new_tokens": args.tokens,
        "methods": [asdict(row) for row in results],
    }
    finish(TABLE, table, rows, dry=args.dry)


if __name__ == "__main__":
    main()
