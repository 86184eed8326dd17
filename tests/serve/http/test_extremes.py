"""A live engine and requests that are extreme: every one is answered, and the engine lives."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from urllib.parse import urlsplit

import fake_engine
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from shoal.ir import Request, ServeJob  # noqa: E402
from shoal.ir.serving import MIN_REPETITION_PENALTY, MIN_TEMPERATURE, SamplingParams  # noqa: E402
from shoal.serve.engine.client import ClientOptions, EngineClient, EngineDownError  # noqa: E402
from shoal.serve.engine.crashes import CrashHistory, key_of  # noqa: E402
from shoal.serve.engine.failure import RequestFailedError  # noqa: E402
from shoal.serve.http.server import ServerOptions, running  # noqa: E402

pytestmark = pytest.mark.multi

PLAIN = {"model": "tiny", "prompt": "plain", "max_tokens": 6, "logprobs": 1}


class Live:
    """A server with one connection to it, that stays."""

    def __init__(self, server):
        self.server = server
        self.pid = server.engine.pid
        address = urlsplit(server.url)
        self.connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)

    def ask(self, body, path="/v1/completions"):
        self.connection.request(
            "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer = self.connection.getresponse()
        data = json.loads(answer.read())
        return answer.status, data.get("choices"), data.get("error"), data.get("usage")


@pytest.fixture(scope="module")
def live(model_directory):
    job = ServeJob(model=str(model_directory), threads=1, precision="fp32", max_running=8)
    with running(job, ServerOptions(port=0)) as server:
        live = Live(server)
        with contextlib.closing(live.connection):
            yield live


def edges(low, high, *more):
    """Numbers of a range, mostly those at its ends; subnormal ones only where named."""
    return st.sampled_from([low, high, *more]) | st.floats(low, high, allow_subnormal=False)


tokens = st.integers(0, 256)
EXTREMES = {
    "temperature": st.sampled_from([0, MIN_TEMPERATURE, 2]) | st.floats(MIN_TEMPERATURE, 2),
    "top_p": edges(1e-300, 1.0, 5e-324, 1e-12),
    "min_p": edges(0.0, 1.0, 5e-324, 1e-300),
    "top_k": st.sampled_from([-1, 0, 1, 257]) | st.integers(-1, 257),
    "seed": st.sampled_from([-(2**63), 2**63 - 1, 0, -1]),
    "repetition_penalty": edges(MIN_REPETITION_PENALTY, 10.0, 1.0),
    "frequency_penalty": edges(-2.0, 2.0, 5e-324),
    "presence_penalty": edges(-2.0, 2.0, -5e-324),
    "logit_bias": st.dictionaries(tokens.map(str), edges(-100.0, 100.0, 5e-324), max_size=300),
    "priority": st.sampled_from([-(2**31), 2**31 - 1, 0]),
    "logprobs": st.integers(0, 20),
    "n": st.integers(1, 4),
    "min_tokens": st.integers(0, 2),
    "stop_token_ids": st.lists(tokens, max_size=16),
    "ignore_eos": st.booleans(),
    "max_tokens": st.integers(2, 4),
    "prompt": st.lists(tokens, min_size=1, max_size=40) | st.text(min_size=1, max_size=40),
    "guided_regex": st.sampled_from(["[a-c]{1,9}", "(a|bc)*d", "x"]),
    "return_token_ids": st.booleans(),
}
REQUESTS = st.fixed_dictionaries({}, optional=EXTREMES).map(lambda one: {**PLAIN, **one})


def valid(body):
    return "guided_regex" not in body or not (body.get("min_tokens") or body.get("ignore_eos"))


def survives(live, body):
    status, choices, error, _ = live.ask(body)
    assert status == 200, error
    assert len(choices) == body.get("n", 1)
    assert live.server.engine.pid == live.pid
    assert live.server.engine.restarts == 0


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=REQUESTS.filter(valid))
def test_extreme_requests_are_answered(live, body):
    survives(live, body)


@pytest.mark.soak
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=REQUESTS.filter(valid))
def test_many_extreme_requests_are_answered(live, body):
    survives(live, body)


def test_the_engine_says_the_same_afterwards(live):
    status, choices, _, _ = live.ask({**PLAIN, "temperature": 0})
    assert status == 200
    assert choices == live.ask({**PLAIN, "temperature": 0})[1]
    assert live.server.engine.pid == live.pid


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 1e-308},
        {"temperature": 9.9e-5},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 1e-3},
    ],
)
def test_numbers_below_what_floats_can_divide_by_are_refused(live, bad):
    status, _, error, _ = live.ask({**PLAIN, **bad})
    assert (status, error["param"]) == (400, next(iter(bad)))
    assert live.ask(PLAIN)[0] == 200
    assert live.server.engine.pid == live.pid


def test_prompts_that_are_too_long_are_told_how_long(live):
    for prompt, length in (("x" * 5000, "5000 tokens"), ([1] * 700, "700 tokens")):
        status, _, error, _ = live.ask({**PLAIN, "prompt": prompt})
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert f"of {length}" in error["message"]
    # What is not counted to its end is estimated.
    _, _, error, _ = live.ask({**PLAIN, "prompt": "word " * 100_000})
    assert "of 500000 characters" in error["message"] or "of about" in error["message"]


def test_tokens_of_the_prompt_that_were_cached(live):
    prompt = [(7 * place + 3) % 256 for place in range(100)]
    body = {**PLAIN, "prompt": prompt, "cache_salt": "own"}
    results = [live.ask(body)[3]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert results[0] == 0
    assert 0 < results[1] < len(prompt)


def test_text_offsets_begin_behind_the_prompt(live):
    for prompt in ("abc", list(b"abc")):
        for echo in (False, True):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "seed": 1}
            _, (choice,), _, _ = live.ask({**body, "logprobs": 0, "ignore_eos": True})
            text = len(live.ask({**body, "echo": echo, "ignore_eos": True})[1][0]["text"])
            assert choice["logprobs"]["text_offset"][0] >= 3
            assert text >= 3 * echo


NESTED = (
    "{% set ns = namespace(a=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% endfor %}{{ ns.a | string | length }}"
)


def test_a_template_without_end_is_a_bad_request(serve_fake, caller, byte_model):
    path = byte_model / "chat_template.jinja"
    chat = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    try:
        path.write_text(NESTED)
        with serve_fake() as server:
            call = caller(server.url)
            status, error = call.error("POST", "/v1/chat/completions", chat)
            assert (status, error["code"]) == (400, "chat_template_error")
            assert call("GET", "/health")[0] == 200
    finally:
        path.unlink()


# Deaths of engines


def test_what_met_two_deaths_is_not_tried_again():
    now = [0.0]
    deaths = CrashHistory(lambda: now[0])
    first = key_of([1, 2], SamplingParams(max_tokens=3, seed=5), None)
    assert first == key_of((1, 2), SamplingParams(max_tokens=3, seed=6), None)
    assert first != key_of([1, 2], SamplingParams(max_tokens=4), None)
    assert first != key_of([1, 2], SamplingParams(max_tokens=3), "adapter")
    deaths.died([first, first], "a")
    deaths.died([first], "a")  # another like it, in the same engine
    deaths.check(first)
    deaths.died([first], "b")
    with pytest.raises(RequestFailedError, match="died 2 times"):
        deaths.check(first)
    now[0] += 601.0
    deaths.check(first)
    deaths.died([first], "c")
    deaths.served(first)
    assert not deaths


def test_a_request_that_kills_is_refused_the_third_time(byte_model):
    """Others that die with it once are served."""
    options = ClientOptions(ping_s=0.1, backoff_s=0.01, max_backoff_s=0.02)

    async def run():
        client = EngineClient(
            ServeJob(model=str(byte_model)), factory="fake_engine:build", options=options
        )
        await client.start()
        params = SamplingParams(max_tokens=3)

        async def ask(name, prompt):
            request = Request(name, prompt, len(prompt), params)
            return [one async for one in client.generate(request)]

        try:
            for number in range(2):
                with pytest.raises(EngineDownError) as result:
                    await ask(f"bad{number}", [fake_engine.CRASH])
                assert result.value.met
                while not client.ready:
                    await asyncio.sleep(0.01)
            restarts = client.restarts
            with pytest.raises(RequestFailedError):
                await ask("bad2", [fake_engine.CRASH])
            assert len(await ask("good", [5, 6])) == 3
            assert client.restarts == restarts == 2
        finally:
            await client.stop()

    asyncio.run(run())


def test_a_router_gives_up_after_two_deaths(serve_fake, caller):
    body = {"model": "bytes", "prompt": [fake_engine.EXIT, 65], "max_tokens": 9}
    with serve_fake(replicas=3) as router:
        call = caller(router.url)
        status, error = call.error("POST", "/v1/completions", body)
        assert (status, error["code"]) == (500, "request_failed")
        status, error = call.error("POST", "/v1/completions", body)
        assert (status, error["code"]) == (500, "request_failed")
        assert call("POST", "/v1/completions", {**body, "prompt": "ab"})[0] == 200
