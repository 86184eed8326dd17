"""[143] Hogwild!: are workers that see each other's tokens as they come faster than one?

Source: Rodionov et al., Hogwild! Inference: Parallel LLM Generation via Concurrent Attention, 2025.

Tokens a second of one, two and four workers: 27M parameters in bf16, 512 tokens of common context,
the layout contiguous (combined takes some 5 % longer); one worker is held against the serving
engine. Sampled from 50 tokens of random weights; rounds in which a text loops are left out, and
counted. Work done: a mini-model trained to share out sums, two workers beside one and beside two
that do not see each other: sums done right over passes until the last. The A/A run has one worker,
and workers who do not see each other; the quick run compares scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge

from shoal.claims.bench.decode import LOOPS, distinct_runs
from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import llama, served
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.core.random import generator

if TYPE_CHECKING:
    from shoal.ir import Request
    from shoal.model.transformer import Transformer
    from shoal.serve.decode.hogwild.engine import HogwildEngine
    from shoal.serve.decode.hogwild.words import WorkerWords
    from shoal.serve.engine.loop import Engine

_CONTEXT, _POSITIONS = 512, 4096
# Passes before the first round, in which kinds of passes are recorded.
_WARM = 40
# Tokens before the end of a round in which loops are looked for.
_WINDOW = 64


@part
class HogwildClaim(BaseClaim, row=143):
    """Workers over one concurrent cache, timed and counted.

    Args:
        pairs: rounds of timing.
        steps: forward passes of a round.
        problems: prompts of eight sums.
    """

    pairs: Annotated[int, Ge(3)] = 21
    steps: Annotated[int, Ge(4)] = 6
    problems: Annotated[int, Ge(10)] = 200

    def collect(self, run: ClaimRun) -> None:
        """Compare scores; the full run also times, trains the mini-model once, and counts."""
        from shoal.claims.lab.sums import trained

        together = not run.as_baseline
        run.put("score_error", _score_errors(run.seed, together=together))
        if run.quick:
            return
        run.progress("training the mini-model", 0.05)
        mini = run.remember("sums", lambda: trained(progress=lambda text: run.progress(text, 0.05)))
        run.progress("sharing out sums", 0.4)
        result = _shared_out(mini, self.problems, run.seed, together=together)
        run.put("done_over_one", result.two, result.one)
        run.put("done_over_isolated", result.two, result.isolated)
        run.put("duplicate_work", result.duplicates)
        run.progress("timing", 0.6)
        timed = _Timing(run.context.model, run.seed)
        seconds = timed.measure(self, run)
        run.details |= {
            "rounds_left_out": self.pairs - len(seconds["one"]),
        }
        if not seconds["one"]:
            why = "every round has a text that repeats itself; give a model that does not"
            run.skip(why, "two_workers", "four_workers")
            return
        run.put("two_workers", seconds["two"], seconds["one"], bound=2.0)
        run.put("four_workers", seconds["four"], seconds["one"], bound=4.0)
        run.put_peer("two_workers", seconds["one"], seconds["engine"])
        run.profile = timed.profile(seconds)


# Scores


def _score_errors(seed: int, *, together: bool) -> tuple[float, ...]:
    """How far the scores of two workers are from those of whole passes, in fp64.

    In one layer keys depend on nothing but their token, so the flattened text is all there is.
    """
    import torch

    from shoal.serve.decode.hogwild.blocks import BlockStore
    from shoal.serve.decode.hogwild.forward import Forward
    from shoal.serve.decode.hogwild.views import Feed, HogwildView
    from shoal.train.zoo import random

    config = llama(64, 1, 4, kv_heads=2, vocab=96, ffn=96, initializer_range=0.15)
    model = random(config, seed).double().requires_grad_(False)
    store = BlockStore(model, 200, longest=200, num_blocks=4)
    forward = Forward(model, store)
    prompt, a, b = store.open(None), store.open("Alice"), store.open("Bob")
    source = generator(seed, purpose="hogwild")
    forward([Feed(HogwildView((prompt,), None), source.integers(0, 96, 20).tolist())])
    errors = []
    for _ in range(25):
        views = HogwildView((prompt, b, a), "Alice"), HogwildView((prompt, a, b), "Bob")
        seen = (
            views
            if together
            else (HogwildView((prompt, a), "Alice"), HogwildView((prompt, b), "Bob"))
        )
        tokens = source.integers(0, 96, 2).tolist()
        scores = forward([Feed(view, [token]) for view, token in zip(seen, tokens, strict=True)])
        for view, result in zip(views, scores, strict=True):
            expected = model(torch.tensor([view.text()]))[0, -1]
            errors.append(float((expected - result).abs().max()))
    return tuple(errors)


# Work done


@dataclass(frozen=True)
class _Done:
    """Sums done right over forward passes, by problem; and work that was done twice."""

    two: tuple[float, ...]
    one: tuple[float, ...]
    isolated: tuple[float, ...]
    duplicates: tuple[float, ...]


def _shared_out(mini: Path, number: int, seed: int, *, together: bool) -> _Done:
    from shoal.claims.lab.sums import MOST, problem, read
    from shoal.model import huggingface

    model = huggingface.read(mini).eval().requires_grad_(False)
    problems = [
        problem(generator(seed, purpose="held-out sums", index=index), MOST)
        for index in range(number)
    ]
    prompts = [one.prompt for one in problems]
    texts = {
        "two": _write(model, prompts, (0, 1), seed),
        "first": _write(model, prompts, (0,), seed),
        "second": _write(model, prompts, (1,), seed + 1),
    }
    isolated = [[*a, *b] for a, b in zip(texts["first"], texts["second"], strict=True)]
    ways = {
        "two": texts["two"] if together else isolated,
        "one": texts["first"],
        "isolated": isolated,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    twice: list[float] = []
    for name, streams in ways.items():
        for given, written in zip(problems, streams, strict=True):
            done = [found for stream in written for found in read(given, stream)]
            first: dict[int, int] = {}
            for label, passes in done:
                first[label] = min(passes, first.get(label, passes))
            whole = len(first) == MOST
            # Who never does the last one is not faster for it.
            passes = max(first.values()) if whole else max(map(len, written))
            rates[name].append(len(first) / passes)
            if name == "two":
                twice.append(1 - len(first) / max(1, len(done)))
    return _Done(*map(tuple, (rates["two"], rates["one"], rates["isolated"], twice)))


def _write(
    model: Transformer, prompts: list[tuple[int, ...]], workers: tuple[int, ...], seed: int
) -> list[list[list[int]]]:
    """What these workers write on each prompt; token i comes from forward pass i."""
    from shoal.claims.lab.sums import END, TAGS
    from shoal.serve.decode.hogwild.engine import HogwildEngine
    from shoal.serve.decode.hogwild.part import Hogwild
    from shoal.serve.decode.hogwild.words import WorkerWords

    words = WorkerWords(prefixes=[[TAGS[worker]] for worker in workers])
    engine = HogwildEngine(
        model,
        Hogwild(workers=2, layout="contiguous", probe_every=0),
        lambda _: words,
        kv_tokens=64 * 256,
        max_position=model.config.max_position,
    )
    params = {"temperature": 1.0, "max_tokens": 40, "stop_ids": frozenset({END})}
    asked = [
        request
        for number, prompt in enumerate(prompts)
        for request in _requests(f"p{number}-", prompt, len(workers), seed + 2 * number, params)
    ]
    texts = served(engine, asked)
    return [texts[n : n + len(workers)] for n in range(0, len(texts), len(workers))]


def _requests(
    name: str, prompt: tuple[int, ...], workers: int, seed: int, params: dict[str, object]
) -> list[Request]:
    from shoal.ir import Request, SamplingParams

    return [
        Request(
            f"{name}{place}",
            list(prompt),
            len(prompt),
            SamplingParams(**params, seed=seed + place, workers=workers),  # type: ignore[arg-type]
            fork_of=f"{name}0" if place else None,
        )
        for place in range(workers)
    ]


# Tokens a second


class _Timing:
    """Engines with one, two and four workers, and the serving engine, on one model."""

    def __init__(self, directory: str | None, seed: int) -> None:
        from shoal.ir import ServeJob
        from shoal.model import huggingface
        from shoal.serve.engine.build import prepare
        from shoal.train.zoo import random

        config = llama(512, 8, 8, vocab=2048, ffn=1376, length=_POSITIONS, name="27m", tied=True)
        self._job = ServeJob(
            model=directory or config.name, precision="bf16", kv_tokens=8192, max_running=8
        )
        read = random(config, seed) if directory is None else huggingface.read(Path(directory))
        self._model = prepare(self._job, read)
        self._seed = seed
        vocab = self._model.config.vocab_size
        source = generator(seed, purpose="hogwild prompt")
        self._prompt = tuple(source.integers(0, vocab, _CONTEXT).tolist())
        self._workers: dict[str, int] = {}

    def measure(self, part: HogwildClaim, run: ClaimRun) -> dict[str, tuple[float, ...]]:
        """Seconds of a token, by arm, of the rounds in which no text repeats itself."""
        from shoal.serve.engine.build import engine_of

        tokens = _WARM + (part.pairs + 3) * part.steps
        params: dict[str, object] = {"temperature": 1.0, "top_k": 50, "max_tokens": tokens}
        engines = {"engine": engine_of(self._job, self._model)[0]}
        workers = {"engine": 1, "one": 1, "two": 2, "four": 4}
        self._workers = run.arms(workers, {"two": "one", "four": "one"})
        arms: dict[str, Callable[[], None]] = {}
        texts: dict[str, list[Request]] = {}
        ends: dict[str, list[int]] = {name: [] for name in self._workers}
        for name, number in self._workers.items():
            engine = engines.get(name) or self._concurrent(number)
            requests = _requests(name, self._prompt, number, self._seed, params)
            texts[name] = requests
            for request in requests:
                engine.add(request)
            for _ in range(_WARM):
                engine.step()

            def steps(
                engine: Engine | HogwildEngine = engine,
                first: Request = requests[0],
                ends: list[int] = ends[name],
            ) -> None:
                for _ in range(part.steps):
                    engine.step()
                ends.append(len(first.tokens))

            arms[name] = steps
        # Who is in the place of whom is in the engines themselves.
        timed = run.race(arms, part.pairs, swaps={})
        lowest = [1.0] * part.pairs
        for name, requests in texts.items():
            shares = [_distinct(requests, end) for end in ends[name][-part.pairs :]]
            lowest = list(map(min, lowest, shares))
        return {
            name: tuple(
                seconds / part.steps / number
                for seconds, share in zip(timed[name], lowest, strict=True)
                if share >= LOOPS
            )
            for name, number in self._workers.items()
        }

    def _concurrent(self, workers: int) -> HogwildEngine:
        from shoal.serve.decode.hogwild.engine import HogwildEngine
        from shoal.serve.decode.hogwild.part import Hogwild

        return HogwildEngine(
            self._model,
            Hogwild(workers=workers, layout="contiguous", probe_every=0),
            _words,
            kv_tokens=16384,
            max_position=_POSITIONS,
        )

    def profile(self, seconds: dict[str, tuple[float, ...]]) -> str:
        """Seconds of a forward pass, by arm."""
        return "; ".join(
            f"{name}: {np.median(s) * number * 1e3:.2f} ms a pass of {number}"
            for (name, number), s in zip(self._workers.items(), seconds.values(), strict=True)
        )


def _distinct(asked: list[Request], end: int) -> float:
    """Share of runs of four tokens that differ, before a place: of the text that loops most."""
    return min(distinct_runs(one.tokens[max(one.n_prompt, end - _WINDOW) : end]) for one in asked)


def _words(workers: int) -> WorkerWords:
    """Words of usual lengths; one token in 48 ends a step, where steps move."""
    from shoal.serve.decode.hogwild.words import WorkerWords

    if workers == 1:
        return WorkerWords()
    return WorkerWords(
        rules=[5] * 60,
        headers={"history": [6] * 8, "others": [7] * 8, "own": [8] * 8},
        prefixes=[[9, 10 + worker] for worker in range(workers)],
        piece=lambda token: b"\n\n" if token % 48 == 0 else b"word",
    )
