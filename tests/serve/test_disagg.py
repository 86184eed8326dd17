"""Engines in processes of their own: the same tokens, counted bytes, and nothing hangs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ServeError  # noqa: E402
from shoal.core.random import generator  # noqa: E402
from shoal.ir import Arrival, Request, SamplingParams, ServeJob  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.serve.cluster.disagg import DisaggEngine, replay  # noqa: E402


@pytest.fixture(scope="module")
def model_dir(random_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model") / "m"
    huggingface.write(where, random_model())
    return where


def job(model_dir: Path, **changes: object) -> ServeJob:
    fields: dict[str, object] = {
        "model": str(model_dir),
        "kv_tokens": 256,
        "max_running": 8,
        "max_step_tokens": 64,
        "threads": 1,
        "disagg": {"prefill": 1, "decode": 1},
    }
    return ServeJob.model_validate({**fields, **changes})


def requests(count: int, *, seed: int = 0) -> list[Request]:
    made = []
    for number in range(count):
        source = generator(seed, purpose="prompts", index=number)
        prompt = source.integers(0, 160, int(source.integers(1, 120))).tolist()
        sampled = {"temperature": 0.8, "seed": number} if number % 3 == 2 else {}
        params = SamplingParams(max_tokens=int(source.integers(1, 24)), **sampled)
        made.append(Request(f"r{number}", prompt, len(prompt), params))
    return made


def drain(engine: DisaggEngine) -> None:
    for _ in range(10_000):
        if not engine.num_open:
            return
        engine.step(5.0)
    raise AssertionError("requests that never end")


@pytest.mark.slow
def test_tokens_are_those_of_one_engine_and_bytes_those_of_the_formula(
    model_dir, random_model, engine_for, serve_all
) -> None:
    alone = requests(12)
    engine = engine_for(random_model(), max_step_tokens=64)
    want = serve_all(engine, [one.tokens for one in alone], [one.params for one in requests(12)])
    apart = requests(12)
    with DisaggEngine(job(model_dir)) as several:
        # Two processes, neither of them this one.
        assert len({*several.pids.values(), os.getpid()}) == 3
        for request in apart:
            several.add(request)
        drain(several)
        results = [one.tokens[one.n_prompt :] for one in apart]
        assert results == want
        # 2 L n_kv d dtype = 2 * 2 * 2 * 16 * 4 bytes a token.
        assert several.token_bytes == 512
        moved = {one.request_id: one.nbytes for one in several.moved}
        longer = {one.id: 512 * one.n_prompt for one in apart if one.params.max_tokens > 1}
        assert moved == longer
        assert several.stats()["moved_bytes_total"] == sum(longer.values())

        # The books are empty again: as many requests once more, and some are aborted.
        again = [
            Request(f"again{n}", [3, 5, 7], 3, SamplingParams(max_tokens=40)) for n in range(4)
        ]
        for request in again:
            several.add(request)
        ended = several.abort("again1")
        assert ended is not None
        assert ended.finish == "abort"
        while again[2].n_generated < 2:
            several.step(5.0)
        several.abort("again2")
        drain(several)
        assert again[0].tokens == again[3].tokens
        assert len(again[0].tokens) == 43

        with pytest.raises(ServeError, match="tokens to keep in the cache"):
            several.add(Request("long", [1] * 100, 100, SamplingParams(max_tokens=1000)))
        with pytest.raises(ServeError, match="vocab_size = 160"):
            several.add(Request("odd", [999], 1, SamplingParams(max_tokens=4)))

        # A vector is given by who computes the prompt; who cannot go on is told, and forgotten.
        pooled = SamplingParams(max_tokens=1, pooling="mean")
        formed = SamplingParams(max_tokens=4, grammar='start: "a"', stop_ids=(0,))
        several.drain_events()
        several.add(Request("vector", [3, 5, 7], 3, pooled))
        several.add(Request("formed", [3, 5, 7], 3, formed))
        drain(several)
        fields = {one["id"]: one for one in several.drain_events()}
        assert "its grammar: " in fields["formed"]["message"]
        assert fields["formed"]["kind"] == "refused"
        serve_all(engine, [[3, 5, 7]], [pooled])
        (want,) = [one["values"] for one in engine.drain_events() if one["kind"] == "vector"]
        assert fields["vector"]["values"] == pytest.approx(want, abs=1e-4)

        # A process that dies is told, at once, and by its name.
        several.add(Request("last", [1, 2], 2, SamplingParams(max_tokens=200)))
        os.kill(several.pids["decode instance 0"], signal.SIGKILL)
        with pytest.raises(ServeError, match=r"decode instance 0 \(process \d+\) died"):
            drain(several)


@pytest.mark.slow
def test_a_trace_is_served_by_instances_of_both_kinds(model_dir) -> None:
    arrivals = [Arrival(0.01 * n, tuple([n % 160] * (5 + n)), 1 + n % 7) for n in range(30)]
    for fields, colocated in (({"disagg": {"prefill": 2, "decode": 1}}, 0), ({}, 2)):
        with DisaggEngine(job(model_dir, **fields), colocated=colocated) as engine:
            seen = replay(engine, arrivals)
        assert [one.n_output for one in seen] == [one.output_tokens for one in arrivals]
        assert all(one.arrival < one.first <= one.finish for one in seen)


def test_what_cannot_be(model_dir) -> None:
    with pytest.raises(ServeError, match=r"disagg.decode: tp, pp"):
        DisaggEngine(job(model_dir, disagg={"prefill": 1, "decode": {"tp": 2}}))
    with pytest.raises(ServeError, match="expected a scheduler of the prefill phase"):
        DisaggEngine(job(model_dir, disagg={"prefill": {"scheduler": "decode"}}))


@pytest.mark.slow
def test_an_instance_that_cannot_load_is_told(tmp_path) -> None:
    with pytest.raises(
        ServeError, match=r"the (prefill|decode) instance 0 failed: .*no such directory"
    ):
        DisaggEngine(job(tmp_path / "none"))
