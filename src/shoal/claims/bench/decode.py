"""``shoal bench decode``: every way to guess, on one target and one set of prompts.

All methods share the target's weights in memory, and answer the same held-out prompts in turn, so
that a busy machine is busy for all of them. What counts is the time of whole answers, beside
plain decoding by the same engine; tokens a step and what a step costs say where it comes from.

An undertrained model under greedy decoding repeats itself, and a loop is easy to guess: of
every answer the share of distinct runs of four tokens is given, and answers below a half are left
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
    from shoal.serve.engine.loop import Engine

PLAIN = "plain"
# Share of distinct runs of four tokens below which an answer is a loop.
LOOPS = 0.5

# Ways that are no guesses for a target, but need a model of their own -> how it is decoded.
OWN = {
    "diffusion": "diffusion",
    "parscale": "autoregressive",
    "duo": "autoregressive",
    "ladder": "autoregressive",
}


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
    prompts = []
    for number in order:
        tokens = split.document(number)
        if len(tokens) >= length + after + 1:
            prompts.append(tokens[:length].tolist())
        if len(prompts) == count:
            return prompts
    raise ConfigError(
        f"prompts: {len(prompts)} held-out documents have {length + after} tokens, but {count} "
        "are needed; give more data with --data, or use fewer or shorter prompts"
    )


@dataclass(frozen=True)
class DecodeBatchResult:
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
        own: ways that are no guesses for the target but models of their own: name -> directory
            and prompts in its tokens, as many as the others answer.
    """

    model: Path
    methods: Mapping[str, Mapping[str, Any] | None]
    precision: str = "bf16"
    threads: int = 2
    max_running: int = 32
    kv_tokens: int = 8192
    loaded: Transformer | None = None
    own: Mapping[str, tuple[Path, Sequence[Sequence[int]]]] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from shoal.serve.engine.build import build_engine, engine_of, load_model

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
            result = job.model_dump() | {"speculative": None if method is None else dict(method)}
            self.engines[name] = engine_of(ServeJob.model_validate(result), target)[0]
        for name, (directory, _) in self.own.items():
            result = {"model": str(directory), "decode": OWN[name]}
            self.engines[name] = build_engine(ServeJob.model_validate(job.model_dump() | result))[0]

    @property
    def names(self) -> list[str]:
        """Of all that is measured."""
        return list(self.engines)

    def answer(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        **sampling: Any,
    ) -> DecodeBatchResult:
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
            # Blocks of masked tokens are chunks of any length.
            passes = OWN.get(name) == "diffusion"
            steps += passes or any(chunk.length == 1 for chunk in engine.last_chunks)
        seconds = time.perf_counter() - began
        after = engine.stats()
        trees, nodes, accepted = (
            int(after.get(key, 0) - before.get(key, 0))
            for key in ("draft_trees_total", "draft_tokens_total", "draft_tokens_accepted_total")
        )
        answers = [request.tokens[request.n_prompt :] for request in requests]
        return DecodeBatchResult(seconds, steps, answers, trees, nodes, accepted)

    def interleaved(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        rounds: int = 1,
        names: Sequence[str] = (),
        seed: int = 0,
        batch: int = 1,
    ) -> dict[str, list[list[DecodeBatchResult]]]:
        """Answers of all methods, batch by batch in changing order.

        Args:
            prompts: token ids.
            new_tokens: of each answer.
            rounds: times that all are answered.
            names: of methods; all, if not given.
            seed: of the order.
            batch: prompts that are answered together.

        Returns:
            Method -> round -> answers, one a batch.
        """
        names = list(names or self.names)
        require(rounds >= 1, "rounds", rounds, expected="at least 1")
        together = {
            name: batches(self.own[name][1] if name in self.own else prompts, batch)
            for name in names
        }
        count = min(map(len, together.values()))
        for name in names:  # kernels are prepared and steps recorded before anything is timed
            for some in together[name][: max(1, 3 // batch)]:
                self.answer(name, some, new_tokens)
        result: dict[str, list[list[DecodeBatchResult]]] = {name: [] for name in names}
        for turn in range(rounds):
            for answers in result.values():
                answers.append([])
            for number in range(count):
                draws = generator(seed, purpose="bench order", step=turn * count + number)
                for place in draws.permutation(len(names)).tolist():
                    name = names[place]
                    some = together[name][number]
                    result[name][turn].append(self.answer(name, some, new_tokens))
        return result


def batches(prompts: Sequence[Sequence[int]], size: int) -> list[list[Sequence[int]]]:
    """Prompts in whole batches: what is left over is not asked, and too few come again.

    Raises:
        ConfigError: a batch of none.
    """
    require(size >= 1, "batch", size, expected="at least 1")
    count = max(1, len(prompts) // size)
    return [
        [prompts[(number * size + place) % len(prompts)] for place in range(size)]
        for number in range(count)
    ]


def lively(bench: Bench, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Sequence[int]]:
    """The prompts whose plain answers do not repeat themselves.

    Raises:
        ConfigError: there is none.
    """
    results: list[Sequence[int]] = []
    for start in range(0, len(prompts), bench.max_running):
        some = prompts[start : start + bench.max_running]
        said = bench.answer(PLAIN, some, new_tokens).tokens
        results += [one for one, new in zip(some, said, strict=True) if distinct_runs(new) >= LOOPS]
    if not results:
        raise ConfigError(
            f"prompts: all {len(prompts)} answers of the model repeat themselves, which every "
            "drafter predicts; train it longer, or give other prompts"
        )
    return results


def regular(answers: Sequence[DecodeBatchResult]) -> list[int]:
    """Places of the answers that are no loops."""
    return [
        place
        for place, one in enumerate(answers)
        if float(np.mean([distinct_runs(tokens) for tokens in one.tokens])) >= LOOPS
    ]


@dataclass(frozen=True)
class DecodeRow:
    """One method on the target, at one size of batch.

    Args:
        method: its name.
        batch: requests that are answered together.
        tokens_per_s: of whole answers, prompts included.
        speedup: over plain decoding: the median of the rounds' ratios.
        low: lower end of its 90 % interval.
        high: upper end of it.
        tokens_per_step: of a step in which a request decodes.
        nodes_per_step: guesses that such a step verifies.
        memory_bytes: of the drafter.
        agreement: share of the tokens before the first that differs from plain decoding's, in the
            precision of the bench; 1 is exact, and less is rounding that falls the other way.
            None for a model of its own.
        distinct_4_grams: of its answers.
        answers: that were judged.
        loops: that were left out.
    """

    method: str
    batch: int
    tokens_per_s: float
    speedup: float
    low: float
    high: float
    tokens_per_step: float
    nodes_per_step: float
    memory_bytes: int
    agreement: float | None
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
    batch: int = 1,
    loops: int = 0,
) -> list[DecodeRow]:
    """All methods of a bench on the same prompts, so many together, plain decoding first.

    Args:
        bench: with plain decoding among its methods.
        prompts: token ids, as :func:`lively` leaves them.
        new_tokens: of each answer.
        rounds: times that all are answered.
        seed: of the order.
        batch: prompts that are answered together.
        loops: prompts that were left out before.

    Raises:
        ConfigError: every answer is a loop, or plain decoding is none of the methods.
    """
    from shoal.core.measure import bootstrap

    require(PLAIN in bench.methods, "methods", list(bench.methods), expected=f"{PLAIN} among them")
    result = bench.interleaved(prompts, new_tokens, rounds=rounds, seed=seed, batch=batch)
    # Rounded otherwise in a batch, an answer can still end in a loop.
    places = regular(result[PLAIN][0])
    if not places:
        raise ConfigError(
            f"batch = {batch}: the answers of all batches repeat themselves; give more --prompts"
        )

    def seconds(name: str, turn: int) -> float:
        return sum(result[name][turn][place].seconds for place in places)

    rows = []
    plain = [result[PLAIN][0][place] for place in places]
    whole = sum(one.count for one in plain)
    for name in bench.names:
        own = [result[name][0][place] for place in places]
        count = sum(one.count for one in own)
        # Answers of other models may have other lengths.
        ratios = [
            seconds(PLAIN, turn) / seconds(name, turn) * count / whole for turn in range(rounds)
        ]
        spread = bootstrap(ratios)
        agreement = None
        if name not in bench.own:
            agreement = sum(map(_same, own, plain)) / max(1, whole)
        # What a request gets of the steps in which it decodes, as if all decoded until the end.
        shares = sum(one.steps * len(one.tokens) for one in own)
        rows.append(
            DecodeRow(
                method=name,
                batch=batch,
                tokens_per_s=rounds * count / sum(seconds(name, turn) for turn in range(rounds)),
                speedup=spread.value,
                low=spread.low,
                high=spread.high,
                tokens_per_step=(count - sum(len(one.tokens) for one in own)) / max(1, shares),
                nodes_per_step=sum(one.nodes for one in own) / max(1, shares),
                memory_bytes=_drafter_bytes(bench.engines[name]),
                agreement=agreement,
                distinct_4_grams=float(
                    np.mean([distinct_runs(tokens) for one in own for tokens in one.tokens])
                ),
                answers=len(places) * batch,
                loops=loops + (len(result[PLAIN][0]) - len(places)) * batch,
            )
        )
    return rows


def _drafter_bytes(engine: Engine) -> int:
    from shoal.serve.decode.runner import SpeculativeRunner

    runner = engine.runner
    return runner.drafter.memory_bytes() if isinstance(runner, SpeculativeRunner) else 0


def _same(found: DecodeBatchResult, wanted: DecodeBatchResult) -> int:
    """Tokens before the first that differs."""
    same = 0
    for mine, theirs in zip(found.tokens, wanted.tokens, strict=True):
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                break
            same += 1
    return same


def advice(rows: Sequence[DecodeRow]) -> str:
    """Which of the methods to use on this machine, in a sentence for each size of batch."""
    notes = []
    several = len({row.batch for row in rows}) > 1
    for batch in sorted({row.batch for row in rows}):
        # Another model answers otherwise, so its speed is no advice for this one.
        best = max(
            (row for row in rows if row.batch == batch and row.agreement is not None),
            key=lambda row: row.speedup,
        )
        where = f"with {batch} request{'s' if batch > 1 else ''} " if several else ""
        if best.method == PLAIN or best.low <= 1.0:
            notes.append(f"{where}no method is faster than plain decoding; do not set speculative")
            continue
        exact = ""
        if best.agreement != 1:
            same = f"{100 * (best.agreement or 0):.1f} %"
            exact = f"; {same} of its tokens precede the first difference"
        notes.append(
            f"{where}{best.method} is fastest: {best.speedup:.2f} times plain decoding "
            f"({best.low:.2f} to {best.high:.2f}) with {best.tokens_per_step:.2f} tokens a step"
            f"{exact}"
        )
    return "\n".join(notes)
