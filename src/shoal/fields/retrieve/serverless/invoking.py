"""Starting calls: a thread for each, after the time that its dispatch takes."""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from shoal.fields.retrieve.serverless.functions import answer_of
from shoal.fields.retrieve.serverless.http import post
from shoal.fields.retrieve.serverless.protocols import (
    LIMIT_S,
    ContainerSetup,
    FunctionReply,
)


class ThreadInvoker(ABC):
    """Base of what calls functions; ``_run`` calls one and waits.

    Args:
        latency_s: that a caller is held by each dispatch, as it is by a service far away.
    """

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s

    @abstractmethod
    def _run(self, name: str, payload: Mapping[str, Any]) -> FunctionReply:
        """Call a function and wait."""

    def start(self, name: str, payload: Mapping[str, Any]) -> Future[FunctionReply]:
        if self._latency_s:
            time.sleep(self._latency_s)
        future: Future[FunctionReply] = Future()

        def run() -> None:
            try:
                future.set_result(self._run(name, payload))
            except BaseException as cause:  # handed to the thread that waits
                future.set_exception(cause)

        threading.Thread(target=run, name=f"call of {name}", daemon=True).start()
        return future

    def invoke(self, name: str, payload: Mapping[str, Any]) -> FunctionReply:
        return self.start(name, payload).result(LIMIT_S)


class RemoteInvoker(ThreadInvoker):
    """Calls functions from inside a container, through the gateway that started it."""

    def __init__(self, setup: ContainerSetup) -> None:
        super().__init__(setup.latency_s)
        self._setup = setup

    def _run(self, name: str, payload: Mapping[str, Any]) -> FunctionReply:
        text = post(self._setup.address, self._setup.token, name, json.dumps(payload))
        answer = answer_of(text)
        return FunctionReply(answer["result"], answer["calls"])
