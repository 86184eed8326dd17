"""A federation from a plan to a report: on the wall clock with processes, or on a virtual one."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.files import write_atomic, write_json
from shoal.core.meter import read_events
from shoal.core.parts import table
from shoal.core.scratch import scratch_directory
from shoal.fields.federate.checkpoint import Checkpoint, RunState
from shoal.fields.federate.clients import parse_clients, slow_factors
from shoal.fields.federate.coordinator import Coordinator
from shoal.fields.federate.costs import machinery, settings_of, step_rates, times_of, work_of
from shoal.fields.federate.exchange import exchange_of
from shoal.fields.federate.hosts import Hosts
from shoal.fields.federate.job import FederatePlan
from shoal.fields.federate.learn.protocols import Learning
from shoal.fields.federate.picture import FederationTimeline, accuracy_chart
from shoal.fields.federate.planes.protocols import PlaneWork, RunningPlane
from shoal.fields.federate.planning import device_shares, divided, processes
from shoal.fields.federate.pooled import AHEAD, Remotely
from shoal.fields.federate.protocols import FederateWork, FederationError, LocalJob, Update
from shoal.fields.federate.virtual import Fit, Lazily, VirtualClock
from shoal.fields.federate.wire.keys import parse_address, read_keys
from shoal.fields.federate.wire.messages import pack
from shoal.fields.kinds import method_of
from shoal.fields.running import RunOutcome, RunProgress
from shoal.train.layout import RunDir

# Name of the file with the state of a run that has not ended.
_CHECKPOINT = "state.safetensors"
# Of a job: what a client need not know, such as where files lie.
_ITS_OWN = {"data", "listen", "keys", "certfile", "keyfile", "attack", "attackers"}
# Seconds between looks at the processes of clients.
_WATCH_S = 0.5


@dataclasses.dataclass
class AccuracyCurve:
    """What the model was worth at each version that was tested.

    Args:
        rows: version, seconds, local steps, bytes to the server, loss, accuracy.
    """

    rows: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def best(self) -> float:
        """The best accuracy."""
        return max((row["accuracy"] for row in self.rows), default=0.0)

    def time_to(self, target: float) -> float | None:
        """Seconds to an accuracy; None if it was not reached."""
        return next((row["seconds"] for row in self.rows if row["accuracy"] >= target), None)


class FederationRun:
    """One run: data, model, coordinator and curve.

    Args:
        plan: with an algorithm.
        progress: of the run.
        work: how long things take on the virtual clock; None for what the plan's machine says.
    """

    def __init__(
        self, plan: FederatePlan, progress: RunProgress, work: FederateWork | None = None
    ) -> None:
        self.plan, self.job, self.progress = plan, plan.job, progress
        self.algorithm = method_of(plan, "algorithm")
        train, self.test, self.rows = divided(self.job)
        self.train = train
        self.features, self.classes = train.x.shape[1:], train.classes
        learner = table("learner").build(self.job.learner, where="learner")
        self.learning: Learning = learner.build(self.features, self.classes)
        self.specs = parse_clients(self.job.clients)
        samples = tuple(map(len, self.rows))
        self.work = work or self._derived(samples)
        names = tuple(spec.name for spec in self.specs)
        self.exchange = exchange_of(self.job, names)
        if why := self.exchange.privacy.refusal():
            raise FederationError(why)
        self.keys = self._keys(names)
        self.curve = AccuracyCurve()
        self.wanted = self.job.rounds * self.job.steps * len(self.specs)
        # Set when the server listens; no update arrives before.
        self.arrived: Callable[[Update], Future[str | None]]
        plane = table("aggregation_plane").build(self.job.plane, where="plane")
        if plane.distributed and self.job.clock == "virtual":
            raise FederationError(
                f"plane: {self.job.plane} has processes of its own, and the virtual clock none; "
                "choose plane: direct, or clock: wall"
            )
        parts = machinery(
            self.job, self.algorithm, self.work.info, self.learning.size, self.exchange
        )
        self.plane: RunningPlane = plane.start(
            PlaneWork(
                size=self.learning.size,
                keys=self.keys,
                job=self.job.model_dump(mode="json"),
                names=names,
                folds=parts.rule.folds,
                arrived=lambda update: self.arrived(update),
            )
        )
        self.coordinator = Coordinator(
            self.work.info,
            dataclasses.replace(parts, plane=self.plane),
            self.learning.start(self.job.seed),
            self._note,
        )
        # Bytes that have reached the server; those of updates, where nothing is sent.
        self.up: Callable[[], float] = self._arrived
        self.checkpoint = Checkpoint(progress.directory / _CHECKPOINT)
        self.before = self.checkpoint.read()
        self.done_s = 0.0
        if self.before is not None:
            self._load(self.before)

    def _derived(self, samples: tuple[int, ...]) -> FederateWork:
        """How long things take on the virtual clock: as the plan has it, on idle cores."""
        shares = device_shares(self.job, self.plan.machine)
        tests = len(self.test)
        rates = step_rates(self.job, self.features, self.classes, tests, self.plan.machine)
        return work_of(
            self.job, samples, self.learning.size, rates, lambda spec: shares[spec.device]
        )

    def _keys(self, names: tuple[str, ...]) -> dict[str, str]:
        """The key of each client: one of its own for this run, or that of the file."""
        if not self.job.keys:
            return {name: secrets.token_hex(16) for name in names}
        keys = read_keys(Path(self.job.keys))
        if set(keys) != set(names):
            odd = sorted(set(keys) ^ set(names))[:3]
            raise FederationError(
                f"keys: {self.job.keys} is for other clients than clients: {self.job.clients}, "
                f"which are {names[0]} to {names[-1]}; {', '.join(odd)} differ"
            )
        return keys

    def _load(self, state: RunState) -> None:
        """Go on from a state."""
        facts, parts = state.facts, ("coordinator", "exchange")
        coordinator, exchange = (
            {
                name.removeprefix(f"{part}."): one
                for name, one in state.arrays.items()
                if name.startswith(f"{part}.")
            }
            for part in parts
        )
        self.coordinator.load(facts["coordinator"], coordinator)
        self.exchange.load(exchange)
        self.curve.rows = [dict(row) for row in facts["curve"]]
        self.done_s = facts["now"]
        self._note("resume", now=facts["now"], version=self.coordinator.version)

    def snapshot(self, now: float, **facts: Any) -> RunState:
        """The state at a time; call it where the coordinator is touched."""
        coordinator, arrays = self.coordinator.state()
        return RunState(
            facts={"now": now, "coordinator": coordinator, **facts},
            arrays={
                **{f"coordinator.{name}": one for name, one in arrays.items()},
                **{f"exchange.{name}": one for name, one in self.exchange.state().items()},
            },
        )

    def keep(self, state: RunState) -> None:
        """Write a state, with what has been tested so far."""
        rows = self.curve.rows
        self.checkpoint.write(RunState(facts={**state.facts, "curve": rows}, arrays=state.arrays))

    def _note(self, kind: str, **fields: Any) -> None:
        self.progress.event(kind, **fields)

    def test_model(self, version: int, now: float, steps: int, model: np.ndarray) -> None:
        """Test a version, and write it down."""
        said = self.learning.evaluate(model, self.test)
        if not math.isfinite(said["loss"]):
            raise FederationError(
                f"version {version}: its loss is not finite; take a smaller lr, of the clients "
                "or of the server"
            )
        row = {"version": version, "seconds": now, "steps": steps, "up_bytes": self.up(), **said}
        self.curve.rows.append(row)
        self._note("evaluate", **row)
        text = f"version {version}, accuracy {said['accuracy']:.1%}, loss {said['loss']:.3g}"
        self.progress.say(min(1.0, steps / self.wanted), text)

    def _arrived(self) -> float:
        bits = self.exchange.compressor.bits(self.learning.size)
        return self.coordinator.arrived * bits / 8

    def tensors(self) -> dict[str, np.ndarray]:
        """The newest model, under the names of the network."""
        tensors, at = {}, 0
        for name, shape in self.learning.layout:
            size = math.prod(shape)
            tensors[name] = self.coordinator.model[at : at + size].reshape(shape)
            at += size
        return tensors

    def over(self, now: float) -> bool:
        """Whether all is done, the target reached, the time spent, or nothing more is possible."""
        job = self.job
        if self.coordinator.failed or self.exchange.privacy.refusal():
            return True
        if self.coordinator.steps >= self.wanted:
            return True
        if job.budget_s is not None and now >= job.budget_s:
            return True
        return job.target is not None and self.curve.best() >= job.target

    def outcome(self, seconds: float, up: float, down: float, **details: Any) -> RunOutcome:
        """The report of the run.

        Raises:
            FederationError: it could not go on.
        """
        if self.coordinator.failed:
            raise FederationError(self.coordinator.failed)
        last = self.curve.rows[-1]
        per_client = [
            self.learning.evaluate(self.coordinator.model, self.train.rows(rows))["accuracy"]
            for rows in (self.rows if not self.job.keys else ())
        ]
        if per_client:
            ranks = np.quantile(per_client, np.linspace(0, 1, min(len(per_client), 101)))
            self._note("fairness", accuracy=ranks.tolist())
        target = self.job.target
        reached = None if target is None else self.curve.time_to(target)
        measured = {
            "total_s": seconds,
            "round_s": seconds / self._rounds(),
            "up_bytes": up,
            "down_bytes": down,
            "accuracy": last["accuracy"],
            "loss": last["loss"],
            "best_accuracy": self.curve.best(),
            # What clients from elsewhere have is not known here.
            **({"worst_client": min(per_client)} if per_client else {}),
            "versions": float(self.coordinator.version),
            "staleness": float(np.mean(self.coordinator.staleness or [0])),
            **self.exchange.privacy.measured(),
            **({} if reached is None else {"target_s": reached}),
        }
        if why := self.exchange.privacy.refusal():
            details["ended"] = why
        if target is not None and reached is None:
            details["missed"] = (
                f"accuracy {target:g} was not reached; the best is {self.curve.best():.3f}"
            )
        return RunOutcome(
            measured=measured,
            details={
                "curve": self.curve.rows,
                "clients": [
                    {"name": spec.name, "samples": len(rows), "accuracy": accuracy}
                    for spec, rows, accuracy in zip(
                        self.specs, self.rows, per_client, strict=not self.job.keys
                    )
                ],
                **details,
            },
        )

    def _rounds(self) -> float:
        """Rounds of work that were aggregated."""
        return max(self.coordinator.steps / (self.job.steps * len(self.specs)), 1e-9)


def execute(plan: FederatePlan, progress: RunProgress) -> RunOutcome:
    """Train, and write ``model.safetensors``, ``curve.json`` and pictures.

    A run that was stopped goes on from its last state: on the virtual clock it ends as if it had
    never been stopped; on the wall clock, clients join again and the jobs that were out are lost.

    Raises:
        ShoalError: the data cannot be read, or a part does not fit.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = FederationRun(plan, progress)
        with contextlib.closing(run.plane):
            outcome = (virtual if plan.job.clock == "virtual" else wall)(run)
    finally:
        torch.set_num_threads(threads)
    _write(run, plan)
    run.checkpoint.remove()
    return outcome


def write_model(run: FederationRun, directory: Path) -> None:
    """``model.safetensors`` and ``curve.json``."""
    words = {"version": run.coordinator.version, "learner": str(run.job.learner)}
    write_atomic(directory / "model.safetensors", pack(run.tensors(), words))
    write_json(directory / "curve.json", run.curve.rows)


def _write(run: FederationRun, plan: FederatePlan) -> None:
    """The model and pictures."""
    directory: Path = run.progress.directory
    write_model(run, directory)
    title = f"{plan.job.name}: {plan.job.algorithm}"
    chart = accuracy_chart(run.curve.rows, plan.job.target, title)
    write_atomic(directory / "accuracy.svg", chart.encode())
    events = RunDir(directory).events
    if not events.exists():  # nobody listens to this run
        return
    timeline = FederationTimeline.of(read_events(events))
    names = [spec.name for spec in run.specs]
    write_atomic(directory / "timeline.svg", timeline.render(names, title).encode())


def pilot(plan: FederatePlan, work: FederateWork) -> list[dict[str, float]]:
    """Learn on the virtual clock to see what a plan reaches.

    Args:
        plan: with an algorithm.
        work: how long things take.

    Returns:
        The rows of its curve.
    """
    with scratch_directory("pilot") as directory:
        quiet = RunProgress(directory, None, lambda *_, **__: None, None)
        run = FederationRun(plan, quiet, work)
        learn(run)
        return run.curve.rows


def virtual(run: FederationRun) -> RunOutcome:
    """All in this process; time is computed."""
    clock = learn(run)
    jobs = run.coordinator.state()[0]["number"]
    sent = run.exchange.compressor.bits(run.learning.size) / 8
    return run.outcome(
        clock.now, run.coordinator.arrived * sent, jobs * 4.0 * run.learning.size, clock="virtual",
        refused=run.coordinator.refused,
    )  # fmt: skip


def learn(run: FederationRun) -> VirtualClock:
    """Drive a run on a virtual clock to its end."""
    if run.job.pool is None:
        return on_virtual_clock(run, _here(run))
    with table("pool").build(run.job.pool, where="pool").open() as pool:
        return on_virtual_clock(run, partial(Remotely, run.job, run.exchange, pool), AHEAD)


def _here(run: FederationRun) -> Fit:
    """Works of clients that are done in this process."""
    settings = settings_of(run.job)
    examples = {
        spec.name: run.exchange.examples(spec.name, run.train.rows(rows))
        for spec, rows in zip(run.specs, run.rows, strict=True)
    }

    def fit(job: LocalJob, base: np.ndarray) -> Lazily:
        def alone(client: str) -> tuple[np.ndarray, float]:
            return run.learning.fit(base, examples[client], job, settings)

        def work() -> tuple[np.ndarray, float]:
            tensors, loss = run.exchange.answer(job, base, run.exchange.attach(job), alone)
            return run.exchange.decode(job, tensors, len(base)), loss

        return Lazily(work)

    return fit


def on_virtual_clock(run: FederationRun, fit: Fit, ahead: int = 0) -> VirtualClock:
    """Drive a run to its end, wherever its clients learn, and test every version.

    Args:
        run: the federation.
        fit: begins the work of a job.
        ahead: works that may have begun before they are due.

    Raises:
        FederationError: nothing is on its way before the end.
    """
    clock = VirtualClock(run.coordinator, times_of(run.work, run.job.seed), fit, ahead)
    if run.before is None:
        clock.begin()
    else:
        clock.load(run.before.facts["clock"])
    tested = int(run.curve.rows[-1]["version"]) if run.curve.rows else -1
    while not run.over(clock.now):
        if run.coordinator.version > tested:
            tested = run.coordinator.version
            run.test_model(tested, clock.now, run.coordinator.steps, run.coordinator.model)
            continue
        if run.checkpoint.due():
            run.keep(run.snapshot(clock.now, clock=clock.state()))
        if not clock.step():
            raise FederationError("no client works, and no timer is set: the run cannot go on")
    if run.coordinator.version > tested:
        run.test_model(
            run.coordinator.version, clock.now, run.coordinator.steps, run.coordinator.model
        )
    return clock


def wall(run: FederationRun) -> RunOutcome:
    """A server in a thread, clients in processes, and tests of the model here."""
    from shoal.fields.federate.wire.server import FederationServer, listening

    news = threading.Condition()
    newest: list[tuple[int, float, int, np.ndarray]] = []
    states: list[RunState] = []
    over = threading.Event()
    server_of: list[FederationServer] = []

    def finished() -> bool:
        server, coordinator = server_of[0], run.coordinator
        with news:
            if not newest or newest[0][0] < coordinator.version:
                newest[:] = [
                    (coordinator.version, server.now, coordinator.steps, coordinator.model)
                ]
                news.notify()
            # What processes of a plane hold is not saved; they hold nothing between aggregations.
            if not (run.plane.distributed and coordinator.summing) and run.checkpoint.due():
                states[:] = [run.snapshot(server.now)]
            if run.over(server.now):
                over.set()
                news.notify()
        return over.is_set()

    description = run.job.model_dump(mode="json", exclude=_ITS_OWN)
    description |= {"features": run.features, "classes": run.classes}

    def make() -> FederationServer:
        server = FederationServer(
            coordinator=run.coordinator,
            exchange=run.exchange,
            keys=run.keys,
            description=description,
            finished=finished,
            elsewhere=bool(run.job.keys),
            before_s=run.done_s,
        )
        run.arrived = server.arrived
        server_of.append(server)
        return server_of[0]

    job = run.job
    with listening(make, *parse_address(job.listen), job.certfile, job.keyfile) as (server, url):
        run.up = lambda: float(server.bytes.up)
        run.progress.say(0.0, f"listening at {url}")
        words = {"url": url, "job": run.job.model_dump(mode="json")}
        dealt = [] if run.job.keys else _dealt(run, run.keys)
        hosts = Hosts(words, dealt, run.job.restarts)
        try:
            tested = int(run.curve.rows[-1]["version"]) if run.curve.rows else -1
            watched = time.monotonic()
            while not over.is_set():
                with news:
                    if not (newest and newest[0][0] > tested) and not over.is_set():
                        news.wait(0.5)
                    row = newest[0] if newest and newest[0][0] > tested else None
                    state = states.pop() if states else None
                if row is not None:
                    tested = row[0]
                    run.test_model(*row)
                if state is not None:
                    run.keep(state)
                if time.monotonic() - watched > _WATCH_S and not over.is_set():
                    hosts.watch(server.gone)
                    watched = time.monotonic()
            seconds = newest[0][1]
            if newest[0][0] > tested:
                run.test_model(*newest[0])
            hosts.farewell()
            if job.keys:
                server.farewell()
        finally:
            hosts.kill()
        used, refused = server.bytes, server.refused
        plane = {} if run.coordinator.failed else dict(run.plane.facts())
    up = used.up + plane.get("up_bytes", 0.0)
    return run.outcome(
        seconds, float(up), float(used.down), clock="wall", requests=used.requests,
        refused=refused, plane=plane, restarted=hosts.restarted,
    )  # fmt: skip


def _dealt(run: FederationRun, keys: dict[str, str]) -> list[list[dict[str, Any]]]:
    """What each process of clients is given of its clients."""
    slow = slow_factors(run.job.speeds, len(run.specs), run.job.slowest, run.job.seed)
    count = processes(run.job, len(run.specs))
    dealt: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    for at, (spec, rows) in enumerate(zip(run.specs, run.rows, strict=True)):
        # Malicious clients collude: all of them are in the first process.
        dealt[max(0, at - run.job.attackers + 1) % count].append(
            {
                "name": spec.name,
                "key": keys[spec.name],
                "rows": rows.tolist(),
                "slow": slow[at],
                "bytes_per_s": spec.bytes_per_s,
            }
        )
    return dealt
