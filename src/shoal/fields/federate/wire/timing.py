"""What a request costs on this machine: a client and a server that really talk."""

from __future__ import annotations

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.federate.aggregate.mean import Mean
from shoal.fields.federate.aggregate.optimizers import ServerSgd
from shoal.fields.federate.coordinator import Coordinator, Machinery
from shoal.fields.federate.exchange import Exchange
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.protocols import ClientInfo, FederationInfo
from shoal.fields.federate.wire.client import ClientSetting, RemoteClient
from shoal.fields.federate.wire.server import FederationServer, listening
from shoal.fields.rates import least_seconds

# Parameters of a small and of a larger model, and jobs that are timed together.
_SMALL, _LARGE, _JOBS = 1_000, 1_000_000, 10


def request_rates() -> tuple[float, float]:
    """Seconds of a request, and of a byte of its body; a job takes two, with a body each."""
    small, large = _job_s(_SMALL), _job_s(_LARGE)
    body = max(0.0, (large - small) / (8 * (_LARGE - _SMALL)))
    return max(0.0, small / 2 - 4 * _SMALL * body), body


def _job_s(size: int) -> float:
    """Seconds of a job without work, with a model of so many parameters."""
    job = FederateJob(clients="1")
    client_info = ClientInfo(name="c0", samples=1)
    info = FederationInfo(clients=(client_info,), steps=1, seed=0)
    exchange, key = Exchange(job, ("c0",)), "timed"
    scheduler = table("client_scheduler").build(Choice(name="fedavg"))
    machinery = Machinery(
        scheduling=scheduler.start(info), rule=Mean(), step=ServerSgd().start(size)
    )
    model = np.zeros(size, np.float32)
    coordinator = Coordinator(info, machinery, model, lambda *_, **__: None)
    setting = ClientSetting(name="c0", key=key, rows=[], slow=1.0, bytes_per_s=0.0)

    def make() -> FederationServer:
        return FederationServer(coordinator, exchange, {"c0": key}, lambda: False)

    with listening(make) as (_, url):
        client = RemoteClient(url, setting)
        try:
            client.join()

            def jobs() -> None:
                for _ in range(_JOBS):
                    given = client.next_job()
                    assert given is not None
                    client.send(given[0], exchange.encode(given[0], given[1]), 0.0)

            jobs()
            return least_seconds(jobs, 3)[0] / _JOBS
        finally:
            client.close()
