"""Several replicas behind one address: whoever dies, nobody waits for ever."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import fake_engine
import psutil
import pytest

import forked_children

pytestmark = pytest.mark.multi

WAIT_S = 30
SHORT = {"model": "bytes", "prompt": "ab", "max_tokens": 2}
SLOW = {"model": "bytes", "prompt": [fake_engine.SLOW, 65, 66, 67], "max_tokens": 60}
TEXT = "abc" * 15  # the slow token has no text


def until(condition, what):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


@pytest.fixture(scope="module")
def router(serve_fake):
    from shoal.serve.http.limits import HttpLimits

    with serve_fake(replicas=2, key="key-of-the-router", limits=HttpLimits(open_requests=8)) as it:
        yield it


@pytest.fixture
def replicas(router):
    until(lambda: len(router.backend.ready) == 2, "a replica is missing")
    return router.backend


@pytest.fixture
def client(router):
    from openai import OpenAI

    with OpenAI(
        base_url=f"{router.url}/v1", api_key="key-of-the-router", max_retries=0, timeout=WAIT_S
    ) as client:
        yield client


@pytest.fixture
def call(router, caller):
    ask = caller(router.url)
    key = {"Authorization": "Bearer key-of-the-router"}

    def make(method, path, body=None, headers=None, *, error=False):
        how = ask.error if error else ask
        return how(method, path, body, {**key, **(headers or {})})

    make.of = ask
    return make


def busy(replicas):
    """The only replica with an open request."""
    until(lambda: any(replica.num_open for replica in replicas.all), "nobody answers")
    (result,) = [replica for replica in replicas.all if replica.num_open]
    return result


def numbers(call, name):
    """label ``replica`` -> value of a metric, or the value where there is no such label."""
    from prometheus_client.parser import text_string_to_metric_families

    text = call("GET", "/metrics")[1].decode()
    return {
        sample.labels.get("replica"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_answers_like_one_server(client, call, replicas):
    assert client.completions.create(**SHORT).choices[0].text == "ab"
    stream = client.completions.create(**SHORT, stream=True, stream_options={"include_usage": True})
    *pieces, last = stream
    assert "".join(piece.choices[0].text for piece in pieces) == "ab"
    assert last.usage.completion_tokens == 2
    chat = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    whole = client.chat.completions.create(**chat).choices[0].message.content
    pieces = client.chat.completions.create(**chat, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    assert client.models.list().data[0].id == "bytes"
    assert client.models.retrieve("bytes").id == "bytes"
    assert len(client.embeddings.create(model="bytes", input="a").data[0].embedding) == 3
    assert json.loads(call("POST", "/tokenize", {"prompt": "ab"})[1])["count"] == 2
    assert json.loads(call.of("GET", "/health")[1]) == {"status": "ok", "replicas": 2, "ready": 2}
    assert call("GET", "/v1/models", headers={"X-Request-Id": "mine"})[0] == 200
    assert call.of.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", {**SHORT, "n": 99}, 400),
        ("POST", "/v1/completions", {**SHORT, "n": 99, "stream": True}, 400),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[" * 1000, 400),
        ("POST", "/v1/completions", {**SHORT, "model": "x", "stream": True}, 404),
        ("POST", "/v1/chat/completions", {"model": "bytes", "messages": 3}, 400),
        ("POST", "/v1/embeddings", {"model": "bytes", "input": {"a": 1}}, 400),
        ("GET", "/v1/models/x", None, 404),
        ("GET", "/nothing", None, 404),
        ("DELETE", "/v1/models", None, 405),
    ],
)
def test_errors_keep_their_shape(call, method, path, body, status):
    assert call(method, path, body, error=True)[0] == status


def test_needs_the_key(call):
    from shoal.serve.http.api import ROUTES

    for method, path in ROUTES:
        expected = 200 if path == "/health" else 401
        assert call.of(method, path)[0] == expected


def test_prompts_go_where_they_were(call, replicas):
    before = numbers(call, "shoal:router_requests_total")
    for number in range(6):
        assert call("POST", "/v1/completions", {**SHORT, "prompt": "ab" * 200 + str(number)})[0]
    after = numbers(call, "shoal:router_requests_total")
    assert sorted(after[replica] - before.get(replica, 0) for replica in after) == [0, 6]


def test_numbers_of_all_replicas(call, replicas):
    assert numbers(call, "shoal:replica_up") == {"0": 1, "1": 1}
    assert set(numbers(call, "shoal:num_requests_running")) == {"0", "1"}
    assert set(numbers(call, "shoal:time_to_first_token_seconds_count")) == {"0", "1"}


def test_a_stream_goes_on_without_a_seam(client, call, replicas):
    before = numbers(call, "shoal:router_resumed_streams_total")[None]
    stream = client.completions.create(**SLOW, stream=True)
    got = [next(stream).choices[0].text, next(stream).choices[0].text]
    victim = busy(replicas)
    first, count = victim.pid, victim.restarts
    os.kill(first, signal.SIGKILL)
    got += [piece.choices[0].text for piece in stream]
    assert "".join(got) == TEXT
    assert numbers(call, "shoal:router_resumed_streams_total")[None] == before + 1
    until(lambda: victim.restarts == count + 1 and victim.ready, "it stays away")
    assert not psutil.pid_exists(first)


def test_a_whole_answer_is_asked_for_again(call, replicas):
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(call, "POST", "/v1/completions", SLOW)
        os.kill(busy(replicas).pid, signal.SIGKILL)
        status, data = answer.result()
    assert status == 200
    assert json.loads(data)["choices"][0]["text"] == TEXT
    assert numbers(call, "shoal:router_retries_total")[None] >= 1


@pytest.mark.slow
def test_an_engine_that_dies_in_its_replica(client, replicas):
    stream = client.completions.create(**SLOW, stream=True)
    got = [next(stream).choices[0].text]
    (engine,) = psutil.Process(busy(replicas).pid).children()
    engine.kill()
    got += [piece.choices[0].text for piece in stream]
    assert "".join(got) == TEXT


def test_what_cannot_go_on_ends_with_one_error(client, replicas):
    from openai import APIError

    stream = client.completions.create(**SLOW, stream=True, logprobs=1)
    next(stream)
    os.kill(busy(replicas).pid, signal.SIGKILL)
    with pytest.raises(APIError, match="cannot go on elsewhere"):
        list(stream)


@pytest.mark.slow
def test_a_replica_that_hangs_is_replaced(serve_fake, monkeypatch):
    from shoal.serve.cluster import replicas as module

    quick = module.WatchOptions(check_s=0.1, hang_s=1.0)
    monkeypatch.setattr(module, "WatchOptions", lambda: quick)
    with serve_fake(replicas=2) as router:
        from openai import OpenAI

        with OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(**SLOW, stream=True)
            got = [next(stream).choices[0].text]
            os.kill(busy(router.backend).pid, signal.SIGSTOP)
            got += [piece.choices[0].text for piece in stream]
            assert "".join(got) == TEXT


def test_leaving_ends_it_at_the_replica(router, call, replicas):
    host, port = router.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key-of-the-router"}
    body = json.dumps({**SLOW, "max_tokens": 3000, "stream": True})
    connection.request("POST", "/v1/completions", body, headers)
    answer = connection.getresponse()
    answer.readline()
    number = str(busy(replicas).number)
    answer.close()
    connection.close()
    until(lambda: not any(replica.num_open for replica in replicas.all), "it goes on")
    until(lambda: numbers(call, "shoal:num_requests_running")[number] == 0, "it goes on there")


def test_full_replicas(call, replicas):
    status, error = call("POST", "/v1/completions", {**SHORT, "n": 9}, error=True)
    assert (status, error["code"]) == (429, "overloaded")
    assert int(call.of.headers["retry-after"]) >= 1


def test_no_replica_is_left_behind(serve_fake, replicas):
    # Those that other tests have killed are back, so nothing else is started meanwhile.
    until(lambda: all(replica.ready for replica in replicas.all), "it stays away")
    before = forked_children.descendants()
    with serve_fake(replicas=2):
        pass
    assert forked_children.descendants() <= before


def test_a_replica_that_cannot_start(serve_fake):
    from shoal.core.errors import ServeError

    with (
        pytest.raises(ServeError, match="no weights; fetch them"),
        serve_fake("fake_engine:build_nothing", replicas=2),
    ):
        pytest.fail("it started")
