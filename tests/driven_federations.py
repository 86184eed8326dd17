"""What tests of schedulers share: a federation without learning, driven on the virtual clock."""

from __future__ import annotations

import numpy as np

from shoal.fields.federate.aggregate.mean import Mean
from shoal.fields.federate.aggregate.optimizers import ServerSgd
from shoal.fields.federate.coordinator import Coordinator, Machinery
from shoal.fields.federate.protocols import ClientInfo, FederationInfo
from shoal.fields.federate.virtual import Lazily, VirtualClock


class Times:
    """Seconds of a job: its steps times those of the client, unless a script says otherwise."""

    def __init__(self, step_s, script=None):
        self.step_s, self.script = step_s, script or {}

    def seconds(self, job):
        return self.script.get(job.number, job.steps * self.step_s[job.client])


def info_of(samples, steps=10, seed=0):
    clients = tuple(ClientInfo(name=name, samples=count) for name, count in samples.items())
    return FederationInfo(clients=clients, steps=steps, seed=seed)


def driven(scheduler, info, times, size=1):
    """A clock whose clients send ones, and the list of its events."""
    events = []

    def note(kind, **fields):
        events.append((kind, fields))

    machinery = Machinery(
        scheduling=scheduler.start(info), rule=Mean(), step=ServerSgd().start(size)
    )
    coordinator = Coordinator(info, machinery, np.zeros(size, np.float32), note)

    def fit(job, base):
        return Lazily(lambda: (np.ones(size, np.float32), 0.0))

    return VirtualClock(coordinator, times, fit), events
