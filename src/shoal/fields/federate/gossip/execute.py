"""Nodes without a server, from a plan to a report: in processes, or on a virtual clock."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import select
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core import children
from shoal.core.files import write_atomic, write_json
from shoal.core.parts import table
from shoal.fields.federate.costs import settings_of
from shoal.fields.federate.gossip.job import GossipPlan
from shoal.fields.federate.gossip.local import LearnedWork
from shoal.fields.federate.gossip.picture import (
    correlation_picture,
    layers_by_round,
    variance_picture,
)
from shoal.fields.federate.gossip.planning import HEADER_BYTES, processes, setting_of, times_of
from shoal.fields.federate.gossip.protocols import LocalWork
from shoal.fields.federate.gossip.virtual import VirtualGossip
from shoal.fields.federate.gossip.wire import NodeLine, checked
from shoal.fields.federate.protocols import FederationError
from shoal.fields.federate.wire.messages import pack
from shoal.fields.running import RunOutcome, RunProgress

# Seconds that processes may take to start, between the word and the beginning, between looks at
# them, and for a look.
_START_S, _BEFORE_S, _EVERY_S, _LOOK_S = 120.0, 0.5, 0.1, 30.0
# Bytes of what a node says of itself: a model and its notes.
_MOST = 1 << 30


@dataclass
class GossipRun:
    """One run: data, learning, and what the nodes were worth.

    Args:
        plan: of the run.
        progress: of the run.

    Attributes:
        curve: rows with ``round``, ``seconds``, ``messages``, ``loss``, ``accuracy``, ``worst``,
            ``disagreement``.
        notes: of all nodes.
    """

    plan: GossipPlan
    progress: RunProgress
    curve: list[dict[str, float]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job = self.plan.job
        self.setting = setting_of(self.job)
        train = self.setting.train
        learner = table("learner").build(self.job.learner, where="learner")
        self.learning = learner.build(train.x.shape[1:], train.classes)
        self.works: list[LocalWork] = [
            LearnedWork(
                learner,
                self.learning,
                train.rows(rows),
                settings_of(self.job.as_federate()),
                self.job.steps,
                (me, self.setting.graph.nodes),
                threading.Lock(),
            )
            for me, rows in enumerate(self.setting.rows)
        ]
        self.models: list[np.ndarray] = []

    def test(self, done: float, now: float, messages: int, models: list[np.ndarray]) -> None:
        """Test the nodes' models, and write it down."""
        self.models = models
        said = [self.learning.evaluate(model, self.setting.test) for model in models]
        wide = np.stack(models).astype(np.float64)
        mean = wide.mean(axis=0)
        row = {
            "round": done,
            "seconds": now,
            "messages": float(messages),
            "loss": float(np.mean([one["loss"] for one in said])),
            "accuracy": float(np.mean([one["accuracy"] for one in said])),
            "worst": min(one["accuracy"] for one in said),
            "disagreement": float(
                ((wide - mean) ** 2).sum(axis=1).mean() / max(mean @ mean, 1e-30)
            ),
        }
        if not math.isfinite(row["loss"]):
            row["loss"] = 1e30  # of a model that has diverged
        self.curve.append(row)
        self.progress.event("evaluate", **row)
        text = f"round {done:.0f}, accuracy {row['accuracy']:.1%}, loss {row['loss']:.3g}"
        self.progress.say(min(1.0, done / self.job.rounds), text)

    def over(self, done: float, now: float) -> bool:
        """Whether all is done, the target reached, or the time spent."""
        job = self.job
        if done >= job.rounds or (job.budget_s is not None and now >= job.budget_s):
            return True
        return job.target is not None and self.curve[-1]["accuracy"] >= job.target

    def outcome(
        self, now: float, messages: int, sent: float, counts: list[int], **details: Any
    ) -> RunOutcome:
        """The report of the run."""
        last, target = self.curve[-1], self.job.target
        reached = next(
            (row for row in self.curve if target is not None and row["accuracy"] >= target), None
        )
        if target is not None and reached is None:
            best = max(row["accuracy"] for row in self.curve)
            details["missed"] = f"accuracy {target:g} was not reached; the best is {best:.3f}"
        if reached is not None:
            details["target_round"] = reached["round"]
        dropped = [note for note in self.notes if "dropped" in note]
        if dropped:
            first = dropped[0]
            details["dropped"] = (
                f"{len(dropped)} messages were dropped; the first, of node {first['dropped']}: "
                f"{first['why']}"
            )
        measured = {
            "total_s": now,
            "round_s": now / max(last["round"], 1e-9),
            "sent_bytes": sent,
            "messages": float(messages),
            "accuracy": last["accuracy"],
            "worst_node": last["worst"],
            "loss": last["loss"],
            "disagreement": last["disagreement"],
            **({} if reached is None else {"target_s": reached["seconds"]}),
        }
        nodes = [
            {
                "name": f"n{me}",
                "samples": len(rows),
                "count": count,
                "accuracy": self.learning.evaluate(model, self.setting.test)["accuracy"],
            }
            for me, (rows, count, model) in enumerate(
                zip(self.setting.rows, counts, self.models, strict=True)
            )
        ]
        layers = layers_by_round(self.notes)
        return RunOutcome(
            measured=measured,
            details={"curve": self.curve, "nodes": nodes, "layers": layers, **details},
        )

    def write(self, outcome: RunOutcome) -> None:
        """The mean of the models, all of them, the curve, and pictures of the layers."""
        folder = self.progress.directory
        mean = np.mean(self.models, axis=0).astype(self.models[0].dtype)
        tensors, at = {}, 0
        for name, shape in self.learning.layout:
            size = math.prod(shape)
            tensors[name] = np.ascontiguousarray(mean[at : at + size].reshape(shape))
            at += size
        words = {"learner": str(self.job.learner)}
        write_atomic(folder / "model.safetensors", pack(tensors, words))
        every = {f"n{me}": np.ascontiguousarray(one) for me, one in enumerate(self.models)}
        write_atomic(folder / "nodes.safetensors", pack(every, words))
        write_json(folder / "curve.json", self.curve)
        layers = outcome.details["layers"]
        if layers:
            write_json(folder / "layers.json", layers)
            write_atomic(folder / "variance.svg", variance_picture(layers).encode())
            write_atomic(folder / "correlation.svg", correlation_picture(layers).encode())


def execute(plan: GossipPlan, progress: RunProgress) -> RunOutcome:
    """Train; write ``model.safetensors``, ``nodes.safetensors``, ``curve.json`` and pictures.

    Raises:
        ShoalError: the data cannot be read, or a part does not fit.
    """
    with _one_thread():
        run = GossipRun(plan, progress)
        outcome = (virtual if plan.job.clock == "virtual" else wall)(run)
    run.write(outcome)
    return outcome


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def virtual(run: GossipRun) -> RunOutcome:
    """All in this process; time is computed."""
    setting, times = run.setting, times_of(run.setting, run.plan.machine)
    nodes = setting.nodes(
        run.works, work_s=times.work_s, unit_s=times.unit_s, rounds=run.job.rounds
    )
    clock = VirtualGossip(nodes, setting.link_s())
    clock.begin()
    run.test(0.0, 0.0, 0, [node.model(0.0) for node in nodes])
    done = 0.0
    while not run.over(done, clock.now):
        if not clock.step():
            raise FederationError("no node works, and no message is on its way: it cannot go on")
        new = math.floor(min(node.progress(clock.now) for node in nodes))
        if new > done:
            done = float(new)
            models = [node.model(clock.now) for node in nodes]
            run.test(done, clock.now, clock.messages, models)
    run.notes = [note for node in nodes for note in node.notes]
    sent = clock.messages * (setting.policy.message_bytes(run.learning.size) + HEADER_BYTES)
    counts = [node.count for node in nodes]
    return run.outcome(clock.now, clock.messages, sent, counts, clock="virtual")


def wall(run: GossipRun) -> RunOutcome:
    """Nodes in processes; they are looked at from here."""
    job, setting = run.job, run.setting
    count, key = setting.graph.nodes, secrets.token_hex(16)
    hosts: list[subprocess.Popen[Any]] = []
    lines: dict[int, NodeLine] = {}
    try:
        shared = setting.policy.share(setting.graph, run.works)
        for at in range(processes(job, count)):
            nodes = list(range(at, count, processes(job, count)))
            hosts.append(_host(run, nodes, key, shared))
        ports: dict[int, int] = {}
        for host in hosts:
            ports |= {int(node): port for node, port in json.loads(_said(host)).items()}
        begun = time.monotonic() + _BEFORE_S
        for host in hosts:
            assert host.stdin is not None
            host.stdin.write(json.dumps({"ports": ports, "begun": begun}) + "\n")
            host.stdin.flush()
        for node in range(count):
            lines[node] = NodeLine.to(ports[node], _MOST, -1, key, _LOOK_S)
        said, now = _watch(run, lines, begun)
    finally:
        for line in lines.values():
            with contextlib.suppress(OSError):
                line.send("stop", {})
            line.close()
        children.kill(hosts)
        for host in hosts:
            for stream in (host.stdin, host.stdout, host.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
    run.notes = [note for one in said for note in one["notes"]]
    # A message is counted by its sender; an exchange by both ends, which have sent one each.
    return run.outcome(
        now, sum(one["messages"] for one in said), float(sum(one["sent"] for one in said)),
        [one["count"] for one in said], clock="wall", refused=sum(one["refused"] for one in said),
        failed=sum(one["failed"] for one in said), gone=[one["me"] for one in said if one["gone"]],
    )  # fmt: skip


def _host(run: GossipRun, nodes: list[int], key: str, shared: Any) -> subprocess.Popen[Any]:
    host = children.start(
        "shoal.fields.federate.gossip.process",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=children.environment({"OMP_NUM_THREADS": "1"}),
    )
    given = {
        "job": run.job.model_dump(mode="json"),
        "nodes": nodes,
        "key": key,
        "shared": shared,
        "unit_s": run.plan.unit_s,
    }
    assert host.stdin is not None
    host.stdin.write(json.dumps(given) + "\n")
    host.stdin.flush()
    return host


def _said(host: subprocess.Popen[Any]) -> str:
    """The line that a process says when its nodes listen.

    Raises:
        FederationError: it has ended, or says nothing.
    """
    assert host.stdout is not None
    ready, _, _ = select.select([host.stdout], [], [], _START_S)
    line = host.stdout.readline() if ready else ""
    if line:
        return str(line)
    host.kill()
    assert host.stderr is not None
    said = host.stderr.read().strip().splitlines()
    raise FederationError(
        f"a process of nodes did not start: {said[-1] if said else f'silent for {_START_S:.0f} s'}"
    )


def _watch(
    run: GossipRun, lines: dict[int, NodeLine], begun: float
) -> tuple[list[dict[str, Any]], float]:
    """Look at all nodes until the run is over; what they said last, and when that was.

    A node that does not answer is gone; the run goes on with the others.

    Raises:
        FederationError: all of them are gone.
    """
    said: dict[int, dict[str, Any]] = {}
    done = -1.0
    time.sleep(max(0.0, begun - time.monotonic()))
    while True:
        for node, line in lines.items():
            if said.get(node, {}).get("gone"):
                continue
            notes = said.get(node, {}).get("notes", [])
            try:
                line.send("look", {})
                kind, words, tensors = line.receive(_LOOK_S)
                checked(kind, "state")
            except (OSError, FederationError):
                if node not in said:
                    raise FederationError(f"node {node} ended before it began") from None
                said[node]["gone"] = True
                run.progress.event("gone", node=node)
                continue
            notes = notes + json.loads(tensors["notes"].tobytes())
            said[node] = {
                **words, "me": node, "notes": notes, "model": tensors["model"], "gone": False
            }  # fmt: skip
        there = [one for one in said.values() if not one["gone"]]
        if not there:
            raise FederationError("all nodes are gone")
        now, new = max(one["now"] for one in there), min(one["progress"] for one in there)
        if math.floor(new) > done:
            done = float(math.floor(new))
            messages = sum(one["messages"] for one in said.values())
            run.test(done, now, messages, [said[node]["model"] for node in sorted(said)])
        if run.over(done, now):
            return [said[node] for node in sorted(said)], now
        time.sleep(_EVERY_S)
