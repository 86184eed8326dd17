"""``shoal bench decode``: every way to guess, on one target and one set of prompts.

All methods share the target's weights in memory, and answer the same held-out prompts in turn, so
that a busy machine is busy for all of them. What counts is the time of whole answers, beside
plain decoding by the same engine; tokens a step and what a step costs say where it comes from.

An undertrained model under greedy decoding repeats itself, and a loop is guessed by anybody: of
every answer the share of distinct runs of four tokens is told, and answers below a half are left
out and counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.core.errors import ConfigError, require
from shoal.core.parts import Choice
from shoal.core.random import generator
from shoal.ir import Request, SamplingParams, ServeJob

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer
    from shoal.serve.engine import Engine

__all__ = [
    "PLAIN",
    "Answer",
    "Bench",
    "Row",
    "advice",
    "compared",
    "distinct_runs",
    "held_out_prompts",
    "kept",
]

PLAIN = "plain"
# Share of distinct runs of four tokens below which an answer is a loop.
LOOPS = 0.5


def distinct_runs(tokens: Sequence[int], length: int = 4) -> float:
    """Share of an answer's runs of so many tokens that are different from each other."""
    runs = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def held_out_prompts(
    model: Path, data: Choice | None, count: int, length: int, *, after: int = 0, seed: int = 0
) -> list[list[int]]:
    """Beginnings of held-out documents, no two of one document.

    Args:
        model: its directory, with the tokenizer.
        data: the corpus; None takes the standard library's source.
        count: prompts.
        length: tokens of each.
        after: tokens that a document must have beside them.
        seed: which documents.

    Raises:
        ConfigError: there are too few documents of that length.
    """
    from shoal.corpora.tokens import prepare
    from shoal.model import huggingface

    vocab = huggingface.read_config(model).vocab_size
    split = prepare(data or Choice(name="stdlib"), str(model / "tokenizer.json"), vocab).heldout
    order = generator(seed, purpose="bench prompts").permutation(split.num_documents).tolist()
    found = []
    for number in order:
        tokens = split.document(number)
        if len(tokens) >= length + after + 1:
            found.append(tokens[:length].tolist())
        if len(found) == count:
            return found
    raise ConfigError(
        f"prompts: {len(found)} held-out documents have {length + after} tokens, and {count} are "
        "wanted; give more data with --data, or ask for fewer or shorter prompts"
    )


@dataclass(frozen=True)
class Answer:
    """One batch of answers.

    Args:
        seconds: from the first request to the last token.
        steps: of the engine that had a decode.
        tokens: of each request.
        trees: that were verified.
        nodes: guesses in them.
        accepted: those that were right.
    """

    seconds: float
    steps: int
    tokens: list[list[int]]
    trees: int = 0
    nodes: int = 0
    accepted: int = 0

    @property
    def count(self) -> int:
        """Tokens of all requests."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request gets of a step in which it decodes; the first comes of the prompt.

        Requests of one batch are assumed to decode together.
        """
        return (self.count / len(self.tokens) - 1) / max(1, self.steps)


@dataclass
class Bench:
    """Engines of several methods over one target.

    Args:
        model: directory of the target.
        methods: name -> part of kind ``speculative``, or None for plain decoding.
        precision: of the target.
        threads: that compute.
        max_running: most requests together.
        kv_tokens: of each engine's cache.
        loaded: the target, if it is in memory already.
    """

    model: Path
    methods: Mapping[str, Mapping[str, Any] | None]
    precision: str = "bf16"
    threads: int = 2
    max_running: int = 32
    kv_tokens: int = 8192
    loaded: Transformer | None = None
    engines: dict[str, Engine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from shoal.serve.build import engine_of, load_model

        job = ServeJob(
            model=str(self.model),
            precision="bf16" if self.precision == "bf16" else "fp32",
            threads=self.threads,
            kv_tokens=self.kv_tokens,
            max_running=self.max_running,
            # Prompts come again, and every answer is to compute its own.
            kv=Choice(name="paged", options={"prefix_reuse": False}),
        )
        target = self.loaded or load_model(job)
        for name, method in self.methods.items():
            told = job.model_dump() | {"speculative": None if method is None else dict(method)}
            self.engines[name] = engine_of(ServeJob.model_validate(told), target)[0]

    def answer(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        **sampling: Any,
    ) -> Answer:
        """Let one method answer prompts, all together.

        Args:
            name: of the method.
            prompts: token ids.
            new_tokens: of each answer.
            sampling: other parameters of the requests.
        """
        engine = self.engines[name]
        params = SamplingParams(max_tokens=new_tokens, **sampling)
        requests = [
            Request(f"{number}", list(prompt), len(prompt), params)
            for number, prompt in enumerate(prompts)
        ]
        before = engine.stats()
        began = time.perf_counter()
        for request in requests:
            engine.add(request)
        steps = 0
        while engine.busy:
            engine.step()
            steps += any(chunk.length == 1 for chunk in engine.last_chunks)
        seconds = time.perf_counter() - began
        after = engine.stats()
        trees, nodes, accepted = (
            int(after[key] - before[key])
            for key in ("draft_trees_total", "draft_tokens_total", "draft_tokens_accepted_total")
        )
        answers = [request.tokens[request.n_prompt :] for request in requests]
        return Answer(seconds, steps, answers, trees, nodes, accepted)

    def interleaved(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        rounds: int = 1,
        names: Sequence[str] = (),
        seed: int = 0,
    ) -> dict[str, list[list[Answer]]]:
        """Answers of all methods, prompt by prompt in changing order.

        Returns:
            Method -> round -> answers, one a prompt.
        """
        names = list(names or self.methods)
        require(rounds >= 1, "rounds", rounds, expected="at least 1")
        for name in names:  # kernels are prepared and steps recorded before anything is timed
            for prompt in prompts[:3]:
                self.answer(name, [prompt], new_tokens)
        found: dict[str, list[list[Answer]]] = {name: [] for name in names}
        for turn in range(rounds):
            for answers in found.values():
                answers.append([])
            for number, prompt in enumerate(prompts):
                draws = generator(seed, purpose="bench order", step=turn * len(prompts) + number)
                for place in draws.permutation(len(names)).tolist():
                    found[names[place]][turn].append(
                        self.answer(names[place], [prompt], new_tokens)
                    )
        return found


def kept(answers: Sequence[Answer]) -> list[int]:
    """Places of the answers that are no loops."""
    return [
        place
        for place, one in enumerate(answers)
        if float(np.mean([distinct_runs(tokens) for tokens in one.tokens])) >= LOOPS
    ]


@dataclass(frozen=True)
class Row:
    """One method on the target.

    Args:
        method: its name.
        tokens_per_s: of whole answers, prompts included.
        speedup: over plain decoding: the median of the rounds' ratios.
        low: lower end of its 90 % interval.
        high: upper end of it.
        tokens_per_step: of a step in which a request decodes.
        nodes_per_step: guesses that such a step verifies.
        memory_bytes: of the drafter.
        agreement: share of the tokens before the first that differs from plain decoding's, in the
            precision of the bench; 1 is exact, and less is rounding that falls the other way.
        distinct_4_grams: of its answers.
        answers: that were judged.
        loops: that were left out.
    """

    method: str
    tokens_per_s: float
    speedup: float
    low: float
    high: float
    tokens_per_step: float
    nodes_per_step: float
    memory_bytes: int
    agreement: float
    distinct_4_grams: float
    answers: int
    loops: int


def compared(
    bench: Bench,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    rounds: int = 3,
    seed: int = 0,
) -> list[Row]:
    """All methods of a bench on the same prompts, plain decoding first.

    Raises:
        ConfigError: every answer is a loop, or plain decoding is none of the methods.
    """
    from shoal.core.measure import bootstrap
    from shoal.serve.decode.runner import SpeculativeRunner

    require(PLAIN in bench.methods, "methods", list(bench.methods), expected=f"{PLAIN} among them")
    found = bench.interleaved(prompts, new_tokens, rounds=rounds, seed=seed)
    places = kept(found[PLAIN][0])
    if not places:
        raise ConfigError(
            f"prompts: all {len(prompts)} answers of the model repeat themselves, and a loop is "
            "guessed by anybody; train it longer, or give prompts that it can go on with"
        )

    def seconds(name: str, turn: int) -> float:
        return sum(found[name][turn][place].seconds for place in places)

    rows = []
    for name in bench.methods:
        ratios = [seconds(PLAIN, turn) / seconds(name, turn) for turn in range(rounds)]
        spread = bootstrap(ratios)
        own = [found[name][0][place] for place in places]
        plain = [found[PLAIN][0][place] for place in places]
        same = sum(_same(a, b) for a, b in zip(own, plain, strict=True))
        runner = bench.engines[name].runner
        rows.append(
            Row(
                method=name,
                tokens_per_s=rounds
                * sum(one.count for one in own)
                / sum(seconds(name, turn) for turn in range(rounds)),
                speedup=spread.value,
                low=spread.low,
                high=spread.high,
                tokens_per_step=sum(one.count - len(one.tokens) for one in own)
                / max(1, sum(one.steps for one in own)),
                nodes_per_step=sum(one.nodes for one in own)
                / max(1, sum(one.steps for one in own)),
                memory_bytes=runner.drafter.memory_bytes()
                if isinstance(runner, SpeculativeRunner)
                else 0,
                agreement=same / max(1, sum(one.count for one in plain)),
                distinct_4_grams=float(
                    np.mean([distinct_runs(tokens) for one in own for tokens in one.tokens])
                ),
                answers=len(places),
                loops=len(prompts) - len(places),
            )
        )
    return rows


def _same(found: Answer, wanted: Answer) -> int:
    """Tokens before the first that differs."""
    same = 0
    for mine, theirs in zip(found.tokens, wanted.tokens, strict=True):
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                break
            same += 1
    return same


def advice(rows: Sequence[Row]) -> str:
    """Which of the methods to use on this machine, in a sentence."""
    best = max(rows, key=lambda row: row.speedup)
    if best.method == PLAIN or best.low <= 1.0:
        return "none pays here: decode one token a step, without speculative"
    same = f"{100 * best.agreement:.1f} %"
    exact = "" if best.agreement == 1 else f"; {same} of its tokens come before any that differs"
    return (
        f"{best.method} pays most: {best.speedup:.2f} times plain decoding "
        f"({best.low:.2f} to {best.high:.2f}) with {best.tokens_per_step:.2f} tokens a step{exact}"
    )
