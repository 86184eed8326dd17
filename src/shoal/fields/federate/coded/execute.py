"""Coded training from a plan to a report: a server here, workers in processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core.files import write_atomic, write_json
from shoal.core.parts import Choice, table
from shoal.fields.federate.coded.job import CodedJob, CodedPlan
from shoal.fields.federate.coded.planning import examples_of, slowness
from shoal.fields.federate.coded.protocols import CodedScheme, Coding, check_models, rounds_of
from shoal.fields.federate.coded.times import loads_of, may_close
from shoal.fields.federate.learn.protocols import Examples, Learning
from shoal.fields.federate.protocols import FederationError
from shoal.fields.federate.wire.messages import pack
from shoal.fields.federate.wire.star import Star, frame
from shoal.fields.kinds import method_of
from shoal.fields.running import RunOutcome, RunProgress

# A round takes longer than this only if something hangs.
_PATIENCE_S = 300.0


@dataclass
class CodedTimes:
    """What rounds have taken.

    Args:
        seconds: of each round.
        waited: rounds that were not over at 1 + mu times the fastest.
        rows: round, worker, seconds and load, as the planner reads them from a log; ``whole`` is
            false where a worker was not waited for.
        examples: that workers whose results came have processed, by round.
    """

    seconds: list[float] = field(default_factory=list)
    waited: int = 0
    rows: list[dict[str, float]] = field(default_factory=list)
    examples: list[list[int]] = field(default_factory=list)


class CodedServer:
    """Drives schemes over the same workers, one run after the other.

    Args:
        star: the workers.
        job: data, models and slow-downs.
        data: what is learned from.
        learning: makes and tests models.
    """

    def __init__(self, star: Star, job: CodedJob, data: Examples, learning: Learning) -> None:
        self._star, self._job, self._data, self.learning = star, job, data, learning
        self._run = 0
        message = frame({"x": data.x, "y": data.y}, {})
        for worker in range(job.workers):
            star.send(worker, message)

    def train(
        self,
        scheme: Choice,
        *,
        draw: int = 0,
        watch: Callable[[int, int], None] = lambda *_: None,
        after: Callable[[int, np.ndarray, np.ndarray], None] = lambda *_: None,
    ) -> tuple[list[np.ndarray], CodedTimes, Coding]:
        """Make all gradient steps.

        Args:
            scheme: how gradients are divided.
            draw: of the slow-downs; each number is another one.
            watch: called with the number of each round and of all rounds.
            after: called with a job, the model that it started from, and its gradient.

        Returns:
            The models float32 [P], what rounds have taken, and the scheme at its end.

        Raises:
            CodedError: the scheme does not fit.
            FederationError: a worker has ended.
        """
        job = self._job
        self._run += 1
        part: CodedScheme = table("coded_scheme").build(scheme, where="scheme")
        coding = part.start(job.workers, job.gradients)
        check_models(job.models, coding.delay)
        ends = np.round(np.cumsum((0.0, *coding.chunks)) * len(self._data)).astype(int).tolist()
        models = [self.learning.start(job.seed + at) for at in range(job.models)]
        rounds = rounds_of(coding, job.gradients)
        factors = slowness(job, len(rounds), draw)
        times, waiting = CodedTimes(), set(range(1, job.gradients + 1))
        results: dict[tuple[int, int, int], np.ndarray] = {}
        for number in rounds:
            begun = time.monotonic()
            loads = loads_of(coding, number, job.workers)
            self._begin(coding, number, models, ends, job.data_s * loads * factors[number - 1])
            arrived = self._collect(coding, number, begun, loads, results, times)
            coding.close(number, arrived)
            for one in sorted(waiting):
                if one > number:
                    break
                found = coding.decode(one)
                if found is None:
                    continue
                total = np.zeros(self.learning.size)
                for result in found:
                    total += result.weight * results[result.round, result.worker, one]
                gradient = (total / len(self._data)).astype(np.float32)
                model = models[one % job.models]
                after(one, model, gradient)
                models[one % job.models] = model - np.float32(job.lr) * gradient
                waiting.discard(one)
            for key in [key for key in results if key[2] not in waiting]:
                del results[key]
            times.seconds.append(time.monotonic() - begun)
            watch(number, len(rounds))
        assert not waiting, "a job was not decoded in time"
        return models, times, coding

    def _begin(
        self,
        coding: Coding,
        number: int,
        models: list[np.ndarray],
        ends: list[int],
        sleep: np.ndarray,
    ) -> None:
        """Send the tasks of a round, with the model of the job that starts in it."""
        job = self._job
        starts = number <= job.gradients
        tensors = {"model": models[number % job.models]} if starts else {}
        for worker in range(job.workers):
            tasks = [
                (one.job, [(ends[chunk], ends[chunk + 1], weight) for chunk, weight in one.parts])
                for one in coding.tasks(number, worker)
            ]
            words = {
                "run": self._run, "round": number, "oldest": number - coding.delay,
                "sleep_s": float(sleep[worker]), "tasks": tasks,
            }  # fmt: skip
            self._star.send(worker, frame(tensors, words))

    def _collect(
        self,
        coding: Coding,
        number: int,
        begun: float,
        loads: np.ndarray,
        results: dict[tuple[int, int, int], np.ndarray],
        times: CodedTimes,
    ) -> frozenset[int]:
        """Wait for results until the round may be closed; workers that have delivered."""
        mu, arrived, fastest = self._job.mu, frozenset[int](), 0.0
        examples: list[int] = []
        seconds: dict[int, float] = {}
        while True:
            elapsed = time.monotonic() - begun
            if arrived and may_close(coding, number, arrived, elapsed, fastest, mu):
                break
            left = (1 + mu) * fastest - elapsed
            found = self._star.receive(left if arrived and left > 0 else _PATIENCE_S)
            if found is None:
                if not arrived or left <= 0:
                    raise FederationError(f"round {number}: no worker has answered")
                continue
            worker, (tensors, words) = found
            if (words.get("run"), words.get("round")) != (self._run, number):
                continue  # of a round that is over
            elapsed = time.monotonic() - begun
            fastest = fastest or elapsed
            arrived |= {worker}
            examples.append(int(words["examples"]))
            seconds[worker] = elapsed
            for name, tensor in tensors.items():
                results[number, worker, int(name)] = tensor
        elapsed = time.monotonic() - begun
        for worker in range(self._job.workers):
            # Of a worker that was not waited for, only so much is known: it takes longer.
            took = {"seconds": seconds.get(worker, elapsed), "whole": worker in arrived}
            times.rows.append(
                {"round": number, "worker": worker, "load": float(loads[worker]), **took}
            )
        times.waited += elapsed > 1.05 * (1 + mu) * fastest
        times.examples.append(examples)
        return arrived


@contextlib.contextmanager
def coded_server(job: CodedJob, data: Examples) -> Iterator[CodedServer]:
    """A server with its workers, as long as the block takes.

    Raises:
        FederationError: a worker does not start.
    """
    learning: Learning = (
        table("learner").build(job.learner, where="learner").build(data.x.shape[1:], data.classes)
    )
    setting: dict[str, Any] = {"learner": job.learner.model_dump(), "classes": data.classes}
    most = 4 * learning.size * (job.models + 1) + data.x.nbytes + data.y.nbytes
    with Star("shoal.fields.federate.coded.worker", [setting] * job.workers, most) as star:
        yield CodedServer(star, job, data, learning)


def execute(plan: CodedPlan, progress: RunProgress) -> RunOutcome:
    """Train, and write ``models.safetensors`` and ``worker_times.json``, a log for the planner.

    Raises:
        ShoalError: the data cannot be read, the scheme does not fit, or a worker ends.
    """
    job, scheme = plan.job, method_of(plan, "scheme")
    train, test = examples_of(job)

    def watch(number: int, rounds: int) -> None:
        progress.tick(number / rounds, f"round {number} of {rounds}", round=number)

    with coded_server(job, train) as server:
        begun = time.monotonic()
        models, times, coding = server.train(scheme, watch=watch)
        seconds = time.monotonic() - begun
        tested = [server.learning.evaluate(model, test) for model in models]
    tensors = {f"model{at}": model for at, model in enumerate(models)}
    write_atomic(
        progress.directory / "models.safetensors", pack(tensors, {"learner": str(job.learner)})
    )
    write_json(progress.directory / "worker_times.json", times.rows)
    rounds = len(times.seconds)
    return RunOutcome(
        measured={
            "total_s": seconds,
            "round_s": seconds / rounds,
            "load": coding.load,
            "waited": times.waited / rounds,
            "accuracy": float(np.mean([one["accuracy"] for one in tested])),
            "loss": float(np.mean([one["loss"] for one in tested])),
        },
        details={"models": tested},
    )
