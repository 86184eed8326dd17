"""A process of clients: each asks for work, learns, and sends what it has learned.

A client that is slower than this machine waits after its work until its factor is reached; of a
link that is slower than this machine's, the time of the bytes is waited for. Several clients of a
process are threads that compute one after the other.
"""

from __future__ import annotations

import json
import ssl
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np

from shoal.core.parts import table
from shoal.fields.federate.clients import parse_clients
from shoal.fields.federate.costs import settings_of
from shoal.fields.federate.exchange import Exchange, Fit, exchange_of
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.learn.protocols import Examples, Learning
from shoal.fields.federate.protocols import FederationError, LocalJob
from shoal.fields.federate.wire.bodies import own_tls
from shoal.fields.federate.wire.messages import SESSION, pack, unpack

# A request for work is held for 20 s; a server that restarts is asked again for so long.
_TIMEOUT_S, _PATIENCE_S = 60.0, 30.0


@dataclass(frozen=True, kw_only=True)
class ClientSetting:
    """One client of a process.

    Args:
        name: of the client.
        key: with which it says who it is.
        rows: of the examples that it has.
        slow: times as long as this machine that a step takes.
        bytes_per_s: of its link; 0 for no limit.
    """

    name: str
    key: str
    rows: list[int]
    slow: float = 1.0
    bytes_per_s: float = 0.0


class RemoteClient:
    """A client that talks to a server.

    Args:
        url: of the server.
        setting: of the client.
        samples: that it has.
        tls: how the server's certificate is held; True for those that the system trusts.

    Attributes:
        attached: what came with the newest job, beside the model.
    """

    def __init__(
        self,
        url: str,
        setting: ClientSetting,
        samples: int = 1,
        tls: ssl.SSLContext | bool = True,
    ) -> None:
        self._setting, self._samples, self._url = setting, samples, httpx2.URL(url)
        self._path = f"/v1/clients/{setting.name}"
        self._address = ""
        self.attached: dict[str, np.ndarray] = {}
        self._http = httpx2.Client(
            headers={"Authorization": f"Bearer {setting.key}"},
            timeout=_TIMEOUT_S,
            trust_env=False,
            verify=tls,
        )

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def join(self) -> Mapping[str, Any]:
        """Say that it is there, and how many examples it has.

        Returns:
            The job of the federation.
        """
        words = {"samples": self._samples}
        answer = self._ask("POST", "/join", content=json.dumps(words).encode())
        if answer.status_code != 200:
            return {}
        self._http.headers[SESSION] = answer.json()["session"]
        return dict(answer.json()["job"])

    def next_job(self) -> tuple[LocalJob, np.ndarray] | None:
        """The next job and its model; None when the run is over."""
        while True:
            answer = self._ask("GET", "/job")
            if answer.status_code == 410:
                return None
            if answer.status_code == 412:
                self.join()
            if answer.status_code == 200:
                # A copy: the bytes that came cannot be written, which PyTorch warns of.
                tensors, words = unpack(bytearray(answer.content))
                self._wait_for(len(answer.content))
                self._address = str(words.pop("address"))
                self.attached = tensors
                return LocalJob(**words), tensors.pop("model")

    def send(self, job: LocalJob, tensors: Mapping[str, np.ndarray], loss: float) -> None:
        """Send an update; one that the server refuses is an event there, and no end here."""
        body = pack(tensors, {"loss": loss})
        self._wait_for(len(body))
        self._ask(
            "POST", f"/updates/{job.number}", content=body, refused=(422,), address=self._address
        )

    def _wait_for(self, size: int) -> None:
        if self._setting.bytes_per_s:
            time.sleep(size / self._setting.bytes_per_s)

    def _ask(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        refused: tuple[int, ...] = (),
        address: str = "",
    ) -> httpx2.Response:
        """An answer; asked again while the server cannot be reached, or has no room."""
        give_up = time.monotonic() + _PATIENCE_S
        url = self._at(address, path)
        while True:
            try:
                answer = self._http.request(method, url, content=content)
            except httpx2.TransportError as cause:
                if time.monotonic() > give_up:
                    raise FederationError(f"the server cannot be reached: {cause}") from cause
                time.sleep(0.2)
                continue
            if answer.status_code == 503:  # it is there: there is room when others are summed
                time.sleep(0.2)
                continue
            # 410: the run is over. 412: the server knows nothing of this client, who joins again.
            if answer.status_code >= 400 and answer.status_code not in (410, 412, *refused):
                raise FederationError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
            return answer

    def _at(self, address: str, path: str) -> httpx2.URL:
        """A URL of this client on the server's host."""
        port, _, prefix = address.removeprefix(":").partition("/")
        url = self._url.copy_with(path=f"{'/' + prefix if prefix else ''}{self._path}{path}")
        return url.copy_with(port=int(port)) if port else url


def work(
    client: RemoteClient,
    setting: ClientSetting,
    learning: Learning,
    examples: Mapping[str, Examples],
    job: FederateJob,
    exchange: Exchange,
    alone: threading.Lock,
) -> None:
    """Learn until the run is over, as a client that has joined.

    Args:
        client: that talks to the server.
        setting: of the client.
        learning: shared by the clients of the process.
        examples: of the clients of the process, by name.
        job: of the run.
        exchange: what its updates pass through.
        alone: held while it computes.
    """
    settings = settings_of(job)

    def fit(local: LocalJob, model: np.ndarray) -> Fit:
        return lambda client: learning.fit(model, examples[client], local, settings)

    while (given := client.next_job()) is not None:
        local, model = given
        with alone:
            begin, used = time.monotonic(), time.thread_time()
            tensors, loss = exchange.answer(local, model, client.attached, fit(local, model))
            used = time.thread_time() - used
        # Of the processor's time, so that processes that wait for each other's cores slow nobody.
        time.sleep(max(0.0, begin + setting.slow * used - time.monotonic()))
        client.send(local, tensors, loss)


def main() -> None:
    """Read what to do from standard input, and do it."""
    import torch

    from shoal.fields.federate.planning import divided

    torch.set_num_threads(1)
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    job = FederateJob.model_validate(given["job"])
    settings = [ClientSetting(**one) for one in given["clients"]]
    train, _, _ = divided(job)
    learner = table("learner").build(job.learner, where="learner")
    learning: Learning = learner.build(train.x.shape[1:], train.classes)
    names = tuple(spec.name for spec in parse_clients(job.clients))
    exchange, alone, failed = exchange_of(job, names), threading.Lock(), []

    examples = {
        one.name: exchange.examples(one.name, train.rows(np.array(one.rows, np.int64)))
        for one in settings
    }

    tls = own_tls(job.certfile) if job.certfile else True

    def run(setting: ClientSetting) -> None:
        try:
            client = RemoteClient(given["url"], setting, len(examples[setting.name]), tls)
            client.join()
            work(client, setting, learning, examples, job, exchange, alone)
        except BaseException as cause:  # handed to the main thread
            failed.append(cause)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in settings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        sys.exit(str(failed[0]))


if __name__ == "__main__":
    main()
