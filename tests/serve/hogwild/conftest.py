"""Workers over a tiny model, with words that are plain token ids."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

torch = pytest.importorskip("torch")

from shoal.ir import Request, SamplingParams  # noqa: E402

# Token -> its bytes: 1 ends a step, 2 is a final answer, all others are words.
PIECES = {1: b"w\n\n", 2: b"ANSWER"}


@pytest.fixture(scope="session")
def engine_of():
    """Model and options -> an engine whose words are token ids."""
    from shoal.serve.decode.hogwild.engine import HogwildEngine
    from shoal.serve.decode.hogwild.part import Hogwild
    from shoal.serve.decode.hogwild.words import WorkerWords

    def make(model, *, probe=(), early=(), headers=True, names=(), capacity=4000, **options):
        part = Hogwild(names=names, **options)

        def words(number):
            if number == 1:
                return WorkerWords(piece=lambda token: PIECES.get(token, b"w"))
            heads = {"history": [10, 11], "others": [12, 13, 14], "own": [15]}
            return WorkerWords(
                rules=[20, 21],
                headers=heads if headers else {},
                prefixes=[[30 + ord(part.name_of(w)[-1]) % 20, 50] for w in range(number)],
                probe=probe,
                early_answer=early,
                marker="ANSWER",
                piece=lambda token: PIECES.get(token, b"w"),
            )

        return HogwildEngine(
            model, part, words, kv_tokens=capacity, max_position=model.config.max_position
        )

    return make


@pytest.fixture(scope="session")
def requests_of():
    """Prompt, workers and sampling -> the requests of one session."""

    def make(prompt, workers, *, name="r", seeds=None, **sampling):
        seeds = seeds or range(workers)
        sampling = {"max_tokens": 24, **sampling}
        return [
            Request(
                f"{name}{place}",
                list(prompt),
                len(prompt),
                SamplingParams(**sampling, seed=seed, workers=workers),
                fork_of=f"{name}0" if place else None,
            )
            for place, seed in enumerate(seeds)
        ]

    return make


@pytest.fixture(scope="session")
def run():
    """Engine and requests -> the new tokens of each, and why each ended."""

    def go(engine, requests, watch=None):
        for request in requests:
            engine.add(request)
        finishes = {}
        steps = 0
        while engine.busy:
            for output in engine.step():
                if output.finish is not None:
                    finishes[output.request_id] = output.finish
            if watch is not None:
                watch(engine)
            steps += 1
            assert steps < 2000
        assert engine.store.num_free == engine.store.capacity
        return (
            [request.tokens[request.n_prompt :] for request in requests],
            [finishes.get(request.id) for request in requests],
        )

    return go
