"""A plan as Flower's ``Strategy``: Shoal's coordinator decides, Flower's grid carries.

With ``clock: virtual`` updates are aggregated in the order of the virtual clock, so that the model
is that of ``shoal run``, whatever the scheduler and however long nodes take. With ``clock: wall``
they are aggregated as they arrive; those that arrived together in the order of their jobs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import asdict
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

from shoal.core.scratch import scratch_directory
from shoal.fields.federate.execute import FederationRun, on_virtual_clock, write_model
from shoal.fields.federate.flower.clients import arrays
from shoal.fields.federate.job import FederatePlan
from shoal.fields.federate.protocols import FederationError, LocalJob, Update, UpdateRefusedError
from shoal.fields.running import RunProgress

# Seconds between two looks for replies or nodes, and for which nodes are waited for.
_PAUSE_S, _PATIENCE_S = 0.02, 600.0


class PlanStrategy(Strategy):  # type: ignore[misc]
    """What a plan says, for all schedulers, rules and server optimizers.

    Args:
        plan: of a federation.

    Attributes:
        run: its state: coordinator, curve, data of the test.
    """

    def __init__(self, plan: FederatePlan) -> None:
        import torch

        torch.set_num_threads(1)
        # A run keeps states on disk, with which another kind of server would go on.
        self._scratch = contextlib.ExitStack()
        directory = self._scratch.enter_context(scratch_directory("flower"))
        self.run = FederationRun(plan, RunProgress(directory, None, _note, None))
        self._timeout = _PATIENCE_S
        self._nodes: dict[str, int] = {}
        # Jobs that have begun and are not sent; those that are out, by message, and their replies.
        self._begun: list[LocalJob] = []
        self._out: dict[str, LocalJob] = {}
        self._in: dict[int, Message] = {}
        self._begin = time.monotonic()

    def summary(self) -> None:
        """One line."""
        log(INFO, "Shoal: %s, %s clients", self.run.algorithm, len(self.run.specs))

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 0,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Any = None,
    ) -> Result:
        """Run the plan to its end: rounds, target and budget are those of its job.

        Args:
            grid: the nodes.
            initial_arrays: not read; the plan's seed gives the model.
            num_rounds: not read.
            timeout: seconds after which a node that does not answer counts as gone.
            train_config: not read.
            evaluate_config: not read.
            evaluate_fn: not called; every version is tested as ``shoal run`` does.

        Raises:
            FederationError: nodes are missing, or all of them have failed.
        """
        self._timeout = timeout
        self.summary()
        with self._scratch:
            (self._virtual if self.run.job.clock == "virtual" else self._wall)(grid)
        result = Result()
        result.arrays = self._arrays()
        for row in self.run.curve.rows:
            result.evaluate_metrics_serverapp[int(row["version"])] = MetricRecord(
                {"accuracy": row["accuracy"], "loss": row["loss"]}
            )
        return result

    # Rounds, for those who drive a strategy themselves

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The jobs that have begun; before the first round all nodes join."""
        if not self._nodes:
            self._meet(grid)
            for name in self._nodes:
                self._begun += self.run.coordinator.join(name, 0.0)
        begun, self._begun = self._begun, []
        return [self._message(job) for job in begun]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take updates, in the order of their jobs."""
        good = sorted((one for one in replies if not one.has_error()), key=lambda one: _number(one))
        for reply in good:
            self._take(reply, float(server_round))
        return self._arrays(), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nodes are not asked to test; the server does."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Nothing was asked."""
        return None

    # Clocks

    def _virtual(self, grid: Grid) -> None:
        self._meet(grid)

        def fit(job: LocalJob, _: np.ndarray) -> _Reply:
            (identity,) = grid.push_messages([self._message(job)])
            self._out[identity] = job
            return _Reply(self, grid, job)

        on_virtual_clock(self.run, fit)

    def _wall(self, grid: Grid) -> None:
        run, coordinator = self.run, self.run.coordinator
        self._meet(grid)
        self._begin = time.monotonic()
        for name in self._nodes:
            self._begun += coordinator.join(name, 0.0)
        tested = -1
        while True:
            now = time.monotonic() - self._begin
            begun, self._begun = self._begun, []
            for job in begun:
                (identity,) = grid.push_messages([self._message(job)])
                self._out[identity] = job
            if coordinator.version > tested:
                tested = coordinator.version
                run.test_model(tested, now, coordinator.steps, coordinator.model)
            if run.over(now):
                return
            if not self._out and coordinator.next_timer() is None:
                raise FederationError("no node works, and no timer is set: the run cannot go on")
            replies = self._replies(grid)
            now = time.monotonic() - self._begin
            for reply in replies:
                self._take(reply, now)
            self._begun += coordinator.due(now)
            if not replies:
                time.sleep(_PAUSE_S)

    # Messages

    def _meet(self, grid: Grid) -> None:
        """Ask every node which client it is.

        Raises:
            FederationError: nodes do not come, or two of them are the same client.
        """
        names = [spec.name for spec in self.run.specs]
        until = time.monotonic() + self._timeout
        while len(nodes := list(grid.get_node_ids())) < len(names):
            if time.monotonic() > until:
                raise FederationError(f"{len(nodes)} of {len(names)} nodes are there")
            time.sleep(_PAUSE_S)
        asked = [
            Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY)
            for node in nodes
        ]
        found: dict[str, int] = {}
        for reply in grid.send_and_receive(asked, timeout=self._timeout):
            if reply.has_error():
                raise FederationError(f"a node cannot join: {reply.error.reason}")
            name = names[int(reply.content["client"]["number"])]
            if name in found:
                raise FederationError(
                    f"two nodes are {name}; give every node a partition-id of its own"
                )
            found[name] = reply.metadata.src_node_id
        missing = [name for name in names if name not in found]
        if missing:
            raise FederationError(f"no node is {missing[0]}; give one its partition-id")
        self._nodes = {name: found[name] for name in names}

    def _message(self, job: LocalJob) -> Message:
        content = RecordDict(
            {
                "model": arrays({"model": self.run.coordinator.base(job)}),
                "job": ConfigRecord(asdict(job)),
            }
        )
        node = self._nodes[job.client]
        return Message(content, dst_node_id=node, message_type=MessageType.TRAIN, ttl=self._timeout)

    def _replies(self, grid: Grid) -> list[Message]:
        """Replies that have come, in the order of their jobs; a node that failed has left.

        Raises:
            FederationError: the last one has.
        """
        good = []
        for reply in grid.pull_messages(list(self._out)):
            job = self._out.pop(reply.metadata.reply_to_message_id)
            if not reply.has_error():
                good.append(reply)
                continue
            log(INFO, "%s has failed: %s", job.client, reply.error.reason)
            now = time.monotonic() - self._begin
            self._begun += self.run.coordinator.leave(job.client, now)
            if not self._out and not good and not self._begun:
                raise FederationError(f"all nodes have failed: {reply.error.reason}")
        return sorted(good, key=_number)

    def _take(self, reply: Message, now: float) -> None:
        """Hand an update on; a client whose update is refused joins again."""
        coordinator, number = self.run.coordinator, _number(reply)
        job = coordinator.jobs.get(number)
        if job is None or self._nodes[job.client] != reply.metadata.src_node_id:
            log(INFO, "update %s: answers no job of its node", number)
            return
        try:
            delta, loss = self.decoded(job, reply)
            update = Update(number=number, client=job.client, delta=delta, loss=loss)
            self._begun += coordinator.update(update, now)
        except UpdateRefusedError as cause:
            log(INFO, "refused: %s", cause)
            self._begun += coordinator.refuse(job.client, cause, now)
            self._begun += coordinator.join(job.client, now)

    def decoded(self, job: LocalJob, reply: Message) -> tuple[np.ndarray, float]:
        """The update and the loss of a reply."""
        tensors = {name: one.numpy() for name, one in reply.content["update"].items()}
        size = self.run.coordinator.model.size
        return self.run.exchange.decode(job, tensors, size), float(reply.content["said"]["loss"])

    def wait(self, grid: Grid, number: int) -> Message:
        """The reply of a job, for which other replies are kept.

        Raises:
            FederationError: its node has failed.
        """
        while number not in self._in:
            replies = list(grid.pull_messages(list(self._out)))
            for reply in replies:
                job = self._out.pop(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    raise FederationError(f"{job.client} has failed: {reply.error.reason}")
                self._in[job.number] = reply
            if not replies:
                time.sleep(_PAUSE_S)
        return self._in.pop(number)

    def _arrays(self) -> ArrayRecord:
        return arrays(self.run.tensors())


class _Reply:
    """What a node will have learned, as the virtual clock awaits it."""

    def __init__(self, strategy: PlanStrategy, grid: Grid, job: LocalJob) -> None:
        self._strategy, self._grid, self._job = strategy, grid, job

    def begin(self) -> None:
        """It has begun at its node."""

    def result(self) -> tuple[np.ndarray, float]:
        """Wait for it."""
        reply = self._strategy.wait(self._grid, self._job.number)
        return self._strategy.decoded(self._job, reply)


def _number(reply: Message) -> int:
    return int(reply.content["said"]["number"])


def _note(kind: str, **fields: Any) -> None:
    if kind == "evaluate":
        log(
            INFO, "version %s: accuracy %.4f, loss %.4f",
            fields["version"], fields["accuracy"], fields["loss"],
        )  # fmt: skip


def server_app(plan: FederatePlan) -> ServerApp:
    """Runs the plan; ``out`` of the run's configuration is where the model is written."""
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        strategy = PlanStrategy(plan)
        strategy.start(grid)
        place = Path(str(context.run_config.get("out", ".")))
        place.mkdir(parents=True, exist_ok=True)
        write_model(strategy.run, place)
        log(INFO, "written: %s", place / "model.safetensors")

    app.main()(main)
    return app
