"""Fewer descriptors than connections: who asks is answered, and the log stays short."""

from __future__ import annotations

import contextlib
import logging
import socket
import time

import psutil
import pytest
from listening import KINDS, listening

from shoal.core.descriptors import free_descriptors
from shoal.core.logs import FoldRepeats

pytestmark = pytest.mark.multi

PARTS = (
    b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Le",
    b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\n{",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_more_connections_than_descriptors_keep_nobody_out(kind, byte_model, tmp_path):
    """400 connections with a part of a request each, and 200 descriptors."""
    with contextlib.ExitStack() as held, listening(
        kind, byte_model, tmp_path, descriptors=200
    ) as it:  # fmt: skip
        process = psutil.Process(it.process.pid)
        for number in range(400):
            connection = held.enter_context(socket.socket())
            connection.settimeout(20)
            connection.connect(("127.0.0.1", it.port))
            connection.sendall(PARTS[number % 2].replace(b"%s", it.posted.encode()))
        before = sum(process.cpu_times()[:2])
        began = time.monotonic()
        answers = [it.ask_health() for _ in range(5)]
        passed = time.monotonic() - began
        busy = sum(process.cpu_times()[:2]) - before
        assert answers == [200] * 5
        # Less than half of what the connections that ask nothing would be waited for.
        assert passed < 15, passed
        time.sleep(2)  # and afterwards it rests
        assert sum(process.cpu_times()[:2]) - before - busy < 1.5
        assert process.num_fds() < 200
    assert len(it.log.read_text().splitlines()) < 50


@pytest.mark.slow
def test_who_is_answered_is_not_cut(byte_model, tmp_path):
    """A stream goes on to its end, however many come meanwhile."""
    import http.client
    import json

    import fake_engine

    body = {"model": "bytes", "prompt": [fake_engine.SLOW, 65], "max_tokens": 100, "stream": True}
    with contextlib.ExitStack() as held, listening(
        "server", byte_model, tmp_path, descriptors=120
    ) as it:  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", it.port, timeout=60)
        held.callback(connection.close)
        connection.request(
            "POST", it.posted, json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        for _ in range(300):
            other = held.enter_context(socket.socket())
            other.connect(("127.0.0.1", it.port))
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_free_descriptors_are_counted():
    before = free_descriptors()
    with socket.socket(), socket.socket():
        assert free_descriptors() == before - 2


@pytest.fixture
def lines():
    """A logger with a filter on a clock that is set by hand, and what it wrote."""
    now = [0.0]
    written = []
    fold = FoldRepeats(10.0, clock=lambda: now[0])
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())
    handler.addFilter(fold)
    logger = logging.getLogger("shoal.tests.folded")
    logger.addHandler(handler)
    logger.propagate = False
    yield logger, fold, now, written
    logger.removeHandler(handler)


def test_equal_lines_are_folded(lines):
    logger, fold, now, written = lines
    for _ in range(1000):
        logger.warning("no %s", "room")
    logger.error("no room")
    logger.warning("another")
    assert written == ["no room", "no room", "another"]
    now[0] = 11.0
    logger.warning("no room")
    assert written[3:] == ["no room (999 more like this)", "no room"]
    logger.warning("no room")
    fold.flush()
    assert written[5:] == ["no room (1 more like this)"]


def test_what_is_counted_is_bounded(lines):
    logger, fold, _, written = lines
    for number in range(2000):
        logger.warning("line %d", number)
        logger.warning("line %d", number)
    assert len(fold._lines) <= 256
    fold.flush()
    assert len(written) == 4000, "each once, and each with its count"
