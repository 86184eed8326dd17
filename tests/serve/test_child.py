"""Instances of an engine that block: whoever waits for them goes on."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("torch")

from shoal.core.errors import ServeError
from shoal.serve.engine import child as module
from shoal.serve.engine.child import Child, readable

pytestmark = pytest.mark.multi


@pytest.mark.slow
def test_a_child_that_has_stopped_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(module, "_SILENT_S", 0.3)
    one = Child("instance", {"kind": "start"})
    try:
        os.kill(one.process.pid, signal.SIGSTOP)
        for wait in (
            lambda: readable([one]),
            one.receive,
            lambda: one.answer("ready"),
            lambda: one.send({"kind": "peers", "caches": "x" * 2**23}),
        ):
            with pytest.raises(ServeError, match=r"no sign within 0\.3 s of the instance"):
                wait()
    finally:
        one.close()
    assert one.process.returncode == -signal.SIGKILL
