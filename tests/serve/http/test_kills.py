"""Replicas that are killed under load: clients see answers or clear errors, and nothing hangs."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import fake_engine
import pytest

import forked_children

pytestmark = pytest.mark.multi

PROMPT = [fake_engine.SLOW, 65, 66, 67]
TEXT = "abc" * 5
WAIT_S = 30
CLEAR = {"replica_lost", "engine_unavailable", "overloaded"}


class Load(threading.Thread):
    """Asks again and again, one answer after the other, and looks at each."""

    def __init__(self, url, seed, over):
        super().__init__(daemon=True)
        self.url, self.over, self.draw = url, over, random.Random(seed)
        self.good, self.bad, self.wrong, self.slowest = [], [], [], 0.0

    def run(self):
        from openai import APIError, OpenAI

        options = {"model": "bytes", "prompt": PROMPT, "max_tokens": 20}
        base = f"{self.url}/v1"
        with OpenAI(base_url=base, api_key="none", max_retries=0, timeout=WAIT_S) as client:
            while not self.over.is_set():
                kind = self.draw.choice(("whole", "stream", "logprobs"))
                began = time.monotonic()
                try:
                    if kind == "whole":
                        text = client.completions.create(**options).choices[0].text
                    else:
                        more = {"logprobs": 1} if kind == "logprobs" else {}
                        stream = client.completions.create(**options, **more, stream=True)
                        text = "".join(piece.choices[0].text for piece in stream)
                except APIError as cause:
                    self.bad.append((kind, cause.code))
                except Exception as cause:
                    self.wrong.append(repr(cause))
                else:
                    (self.good if text == TEXT else self.wrong).append(text)
                self.slowest = max(self.slowest, time.monotonic() - began)


@pytest.mark.parametrize(
    ("kills", "pause_s"),
    [
        pytest.param(2, 1.0, marks=pytest.mark.slow),
        pytest.param(12, 10.0, marks=pytest.mark.soak),
    ],
)
def test_kills_under_load(serve_fake, kills, pause_s, record_property):
    draw = random.Random(7)
    over = threading.Event()
    before = forked_children.descendants()
    with serve_fake(replicas=2) as router:
        threads = [Load(router.url, seed, over) for seed in range(4)]
        for thread in threads:
            thread.start()
        replicas = router.backend
        for number in range(kills):
            over.wait(pause_s)
            end = time.monotonic() + WAIT_S
            while not all(replica.ready for replica in replicas.all):
                assert time.monotonic() < end, "a replica stays away"
                time.sleep(0.02)
            os.kill(draw.choice(replicas.all).pid, signal.SIGKILL)
            answered = sum(len(thread.good) for thread in threads)
            end = time.monotonic() + WAIT_S
            while sum(len(thread.good) for thread in threads) < answered + 8:
                assert time.monotonic() < end, f"nothing is answered after kill {number}"
                time.sleep(0.02)
        over.set()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a request hangs"
        assert sum(replica.restarts for replica in replicas.all) >= kills - 1
    wrong = [what for thread in threads for what in thread.wrong]
    assert wrong == []
    # Only what cannot go on without a seam breaks off, and says so.
    bad = [error for thread in threads for error in thread.bad]
    assert {code for _, code in bad} <= CLEAR
    assert {kind for kind, _ in bad} <= {"logprobs"}
    assert max(thread.slowest for thread in threads) < WAIT_S
    assert forked_children.descendants() <= before
    good = sum(len(thread.good) for thread in threads)
    text = f"{kills} kills, {good} answers right, 0 wrong, {len(bad)} ended with an error"
    record_property("figure", text)
