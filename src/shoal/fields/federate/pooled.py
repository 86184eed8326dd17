"""Works of clients on a pool: processes of this machine or of a cluster, with the same results.

What a client learns is computed there; what an update passes through afterwards has state, and is
done in the process of the server, in the order of arrivals.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future

import numpy as np

from shoal.core.parts import table
from shoal.core.pool import Pool
from shoal.fields.federate.costs import settings_of
from shoal.fields.federate.exchange import Exchange
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.learn.protocols import Examples, Learning
from shoal.fields.federate.protocols import LocalJob

AHEAD = 32
"""Works that are on the pool at once; as many updates are in the memory of the server at most."""


class Remotely:
    """A work that a pool does.

    Args:
        job: of the run.
        exchange: what updates pass through.
        pool: of workers.
        local: the client's job.
        base: the model from which it starts, float32 [P].
    """

    def __init__(
        self, job: FederateJob, exchange: Exchange, pool: Pool, local: LocalJob, base: np.ndarray
    ) -> None:
        self._job, self._exchange, self._pool = job, exchange, pool
        self._local, self._base = local, base
        self._begun: dict[str, Future[tuple[np.ndarray, float]]] = {}

    def begin(self) -> None:
        """Give it to the pool."""
        self._of(self._local.client)

    def result(self) -> tuple[np.ndarray, float]:
        """Wait for it, and let it pass through the exchange."""

        def fit(client: str) -> tuple[np.ndarray, float]:
            return self._of(client).result()

        delta, loss = self._exchange.learn(self._local, self._base, fit)
        tensors = self._exchange.encode(self._local, delta)
        return self._exchange.decode(self._local, tensors, len(self._base)), loss

    def _of(self, client: str) -> Future[tuple[np.ndarray, float]]:
        if client not in self._begun:
            text = self._job.model_dump_json()
            self._begun[client] = self._pool.submit(
                fit_there, text, client, self._local, self._base
            )
        return self._begun[client]


def fit_there(
    text: str, client: str, local: LocalJob, base: np.ndarray
) -> tuple[np.ndarray, float]:
    """What a client learns, in a process of a pool.

    Args:
        text: the job of the run, as JSON.
        client: whose examples are learned from.
        local: the job of the client.
        base: the model from which it starts, float32 [P].
    """
    job, learning, examples = _members(text)
    return learning.fit(base, examples[client], local, settings_of(job))


@functools.lru_cache(maxsize=2)
def _members(text: str) -> tuple[FederateJob, Learning, dict[str, Examples]]:
    import torch

    from shoal.fields.federate.clients import parse_clients
    from shoal.fields.federate.planning import divided

    torch.set_num_threads(1)
    job = FederateJob.model_validate_json(text)
    train, _, rows = divided(job)
    names = tuple(spec.name for spec in parse_clients(job.clients))
    exchange = Exchange(job, names)
    learner = table("learner").build(job.learner, where="learner")
    examples = {
        name: exchange.examples(name, train.rows(mine))
        for name, mine in zip(names, rows, strict=True)
    }
    return job, learner.build(train.x.shape[1:], train.classes), examples
