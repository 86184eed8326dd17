"""APPFL's FedCompass with the clients of the claim, run by the Python of APPFL's own environment.

``python -m shoal.claims.experiments.fedcompass_appfl`` reads a job from standard input and writes a
line of JSON: seconds to the target, best accuracy. Scheduler, aggregator, server and the clients'
connections (gRPC) are APPFL's; data, learning and slow-downs are those of Shoal's clients. Its
aggregator gets changes of models, and keeps no memory back (the quicker of its settings).
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from shoal.core import children
from shoal.core.parts import table
from shoal.fields.federate.clients import parse_clients
from shoal.fields.federate.costs import settings_of
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.planning import divided
from shoal.fields.federate.protocols import LocalJob

_MODULE = "shoal.claims.experiments.fedcompass_appfl"
# Seconds between looks at the version.
_LOOK_S = 0.02


def learning_of(job: FederateJob, features: tuple[int, ...], classes: int) -> Any:
    """The model, in one thread."""
    import torch

    torch.set_num_threads(1)
    return table("learner").build(job.learner).build(features, classes)


def tensors_of(learning: Any, flat: np.ndarray) -> dict[str, Any]:
    """A vector as the named tensors that APPFL sends."""
    import torch

    tensors, at = {}, 0
    for name, shape in learning.layout:
        size = int(np.prod(shape))
        tensors[name] = torch.from_numpy(flat[at : at + size].reshape(shape).copy())
        at += size
    return tensors


def flat_of(learning: Any, tensors: Any) -> np.ndarray:
    """Named tensors as a vector."""
    return np.concatenate([tensors[name].numpy().ravel() for name, _ in learning.layout])


def client(given: dict[str, Any]) -> None:
    """One client: asks, learns, sleeps, sends."""
    wire = importlib.import_module("appfl.comm.grpc")
    job, at = FederateJob.model_validate(given["job"]), given["at"]
    train, _, rows = divided(job)
    learning = learning_of(job, train.x.shape[1:], train.classes)
    examples, settings, number = train.rows(rows[at]), settings_of(job), at * 1_000_000
    learning.fit(learning.start(0), examples, _job(0, 2), settings)  # warm
    name = f"c{at}"
    link = wire.GRPCClientCommunicator(name, server_uri=given["uri"], optimize_memory=False)
    link.invoke_custom_action(action="set_sample_size", sample_size=len(examples), sync=True)
    tensors, steps = link.get_global_model(init_model=True), job.steps
    while True:
        model, number = flat_of(learning, tensors), number + 1
        begin, used = time.monotonic(), time.thread_time()
        after, _ = learning.fit(model, examples, _job(number, steps), settings)
        used = time.thread_time() - used
        time.sleep(max(0.0, begin + given["slow"] * used - time.monotonic()))
        tensors, words = link.update_global_model(tensors_of(learning, model - after))
        steps = int(words["local_steps"])


def _job(number: int, steps: int) -> LocalJob:
    return LocalJob(number=number, client="", version=0, steps=steps, started=0.0)


def server(given: dict[str, Any]) -> dict[str, float]:
    """Serve until the target is reached or the time is spent."""
    agents, config = (importlib.import_module(f"appfl.{name}") for name in ("agent", "config"))
    grpc, omegaconf = map(importlib.import_module, ("appfl.comm.grpc", "omegaconf"))
    job = FederateJob.model_validate(given["job"])
    train, test, _ = divided(job)
    learning = learning_of(job, train.x.shape[1:], train.classes)
    count = len(parse_clients(job.clients))
    module = learning._make()
    module.load_state_dict(tensors_of(learning, learning.start(job.seed)))

    class Agent(agents.ServerAgent):  # type: ignore[misc, name-defined]  # known when it is there
        def _load_model(self) -> None:
            self.model = module

    many, most = {"num_clients": count, "optimize_memory": False}, job.steps
    speeds = {"max_local_steps": most, "min_local_steps": max(1, most // 5)}
    configs = {
        "num_clients": count, "num_global_epochs": 10**9, "optimize_memory": False,
        "scheduler": "CompassScheduler", "aggregator": "FedCompassAggregator",
        "scheduler_kwargs": {
            **many, **speeds, "speed_momentum": 0.9, "latest_time_factor": 1.2,
            "same_init_model": True,
        },
        "aggregator_kwargs": {
            **many, "alpha": given["alpha"], "gradient_based": True, "staleness_fn": "polynomial",
            "staleness_fn_kwargs": {"a": 0.5},
        },
        "logging_output_dirname": given["directory"], "logging_output_filename": "log",
    }  # fmt: skip
    agent = Agent(
        config.ServerAgentConfig(
            client_configs=omegaconf.OmegaConf.create({"train_configs": {"send_gradient": True}}),
            server_configs=omegaconf.OmegaConf.create(configs),
        )
    )
    uri = f"127.0.0.1:{given['port']}"
    wire = grpc.GRPCServerCommunicator(agent, logger=agent.logger, optimize_memory=False)
    threading.Thread(
        target=grpc.serve, args=(wire,), kwargs={"server_uri": uri}, daemon=True
    ).start()
    hosts = []
    for at, slow in enumerate(job.speeds):
        host = children.start(_MODULE, "client", stdin=subprocess.PIPE, text=True)
        words = {"job": given["job"], "at": at, "slow": slow, "uri": uri}
        assert host.stdin is not None
        host.stdin.write(json.dumps(words) + "\n")
        host.stdin.flush()
        hosts.append(host)
    try:
        return _watched(agent, learning, test, job, hosts)
    finally:
        children.kill(hosts)


def _watched(
    agent: Any, learning: Any, test: Any, job: FederateJob, hosts: Any
) -> dict[str, float]:
    """Test each version; the clock begins when the first has gone out."""
    seen, best = 0, 0.0
    while True:
        time.sleep(_LOOK_S)
        if any(host.poll() is not None for host in hosts):
            raise RuntimeError("a client of APPFL has ended")
        version, now = agent.scheduler.global_timestamp, time.time()
        if not version:
            continue
        passed = now - agent.scheduler.start_time
        if version > seen:
            seen = version
            model = flat_of(learning, agent.aggregator.global_state)
            best = max(best, learning.evaluate(model, test)["accuracy"])
        if best >= (job.target or 2.0) or passed >= (job.budget_s or 60.0):
            return {"seconds": passed, "best": best, "versions": seen}


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    if sys.argv[1:] == ["client"]:
        client(given)
    else:
        print(json.dumps(server(given)), flush=True)
