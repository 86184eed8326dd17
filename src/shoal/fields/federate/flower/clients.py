"""A client of the plan as Flower's ``ClientApp``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from shoal.core.parts import table
from shoal.fields.federate.clients import parse_clients
from shoal.fields.federate.costs import settings_of
from shoal.fields.federate.exchange import Exchange
from shoal.fields.federate.job import FederateJob, FederatePlan
from shoal.fields.federate.learn.protocols import Examples, Learning
from shoal.fields.federate.planning import divided
from shoal.fields.federate.protocols import FederationError, LocalJob

# Record of a node in which a compressor keeps what it has left out.
_LEFT = "shoal.left"


@dataclass(frozen=True)
class FlowerMember:
    """What every client of a process shares.

    Args:
        job: of the run.
        names: of all clients.
        examples: of all of them, by client.
        learning: the model.
        exchange: what updates pass through.
    """

    job: FederateJob
    names: tuple[str, ...]
    examples: dict[str, Examples]
    learning: Learning
    exchange: Exchange

    def name(self, context: Context) -> str:
        """The client that a node is.

        Raises:
            FederationError: the node has no number, or one of no client.
        """
        number = context.node_config.get("partition-id")
        if not isinstance(number, int) or not 0 <= number < len(self.names):
            raise FederationError(
                f"node: partition-id = {number!r}; start it with --node-config "
                f"'partition-id=N', N from 0 to {len(self.names) - 1}"
            )
        return self.names[number]


@functools.lru_cache(maxsize=1)
def _member(job_json: str) -> FlowerMember:
    import torch

    torch.set_num_threads(1)
    job = FederateJob.model_validate_json(job_json)
    train, _, rows = divided(job)
    names = tuple(spec.name for spec in parse_clients(job.clients))
    learner = table("learner").build(job.learner, where="learner")
    exchange = Exchange(job, names)
    return FlowerMember(
        job=job,
        names=names,
        examples={
            name: exchange.examples(name, train.rows(some))
            for name, some in zip(names, rows, strict=True)
        },
        learning=learner.build(train.x.shape[1:], train.classes),
        exchange=exchange,
    )


def client_app(plan: FederatePlan) -> ClientApp:
    """Queries are answered with the client's number, training with an update."""
    job_json = plan.job.model_dump_json()
    app = ClientApp()

    def who(message: Message, context: Context) -> Message:
        member = _member(job_json)
        number = member.names.index(member.name(context))
        return Message(RecordDict({"client": MetricRecord({"number": number})}), reply_to=message)

    def train(message: Message, context: Context) -> Message:
        member = _member(job_json)
        name, job = member.name(context), LocalJob(**dict(message.content["job"]))
        if job.client != name:
            raise FederationError(f"node: it is {name}, and was given a job of {job.client}")
        model = message.content["model"]["model"].numpy()
        settings = settings_of(member.job)

        def fit(client: str) -> tuple[np.ndarray, float]:
            return member.learning.fit(model, member.examples[client], job, settings)

        delta, loss = member.exchange.learn(job, model, fit)
        kept = context.state.get(_LEFT, ArrayRecord())
        member.exchange.load_client(name, {key: one.numpy() for key, one in kept.items()})
        tensors = member.exchange.encode(job, delta)
        context.state[_LEFT] = arrays(member.exchange.client_state(name))
        content = RecordDict(
            {
                "update": arrays(tensors),
                "said": MetricRecord({"number": job.number, "loss": loss}),
            }
        )
        return Message(content, reply_to=message)

    app.query()(who)
    app.train()(train)
    return app


def arrays(tensors: Mapping[str, np.ndarray]) -> ArrayRecord:
    """A record of tensors by name."""
    return ArrayRecord({name: Array(np.ascontiguousarray(one)) for name, one in tensors.items()})
