"""Snapshot processes that do not die but block: whoever waits for them goes on."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from shoal.checkpoint.inmemory import fleet, wire


def test_an_exchange_with_a_member_that_blocks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_SILENT_S", 0.2)
    near, far = socket.socketpair()
    other, end = socket.socketpair()
    with near, far, other, end:
        # More than the buffers of a socket take, and nobody reads or writes at the other ends.
        out, into = memoryview(bytes(2**24)), memoryview(bytearray(8))
        with pytest.raises(OSError, match="did not respond"):
            wire.exchange_bytes(near, other, out, into)


def test_a_process_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_ANSWER_S", 0.2)
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert fleet._line(process) == ""
        assert process.wait(20) < 0
