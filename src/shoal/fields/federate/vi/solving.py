"""Solve a variational inequality: workers in this process, or processes that talk over sockets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.federate.protocols import FederationError
from shoal.fields.federate.vi.ends import Center, Sender, Tensors, received
from shoal.fields.federate.vi.protocols import SERVER, MeanExchange, ViError
from shoal.fields.federate.vi.setting import ViSetting, built, described_as
from shoal.fields.federate.wire.star import Star, frame

# A message takes longer than this only if something hangs.
_PATIENCE_S = 300.0
# Growth of |z|^2 over the start's (at least 1), and of the error, which is taken for divergence.
_GROWTH, _WORSE = 1e8, 1e4
# Points of a curve.
_POINTS = 500


@dataclass
class ViTraffic:
    """What has been sent, as the server has received or sent it.

    Args:
        up_floats: numbers of float32 from all workers.
        up_payload: bytes of their tensors.
        down_payload: bytes of tensors to one worker, times workers.
        up_bytes: bytes on the sockets, framing included; 0 without sockets.
        down_bytes: likewise.
        messages: on the sockets.
    """

    up_floats: int = 0
    up_payload: int = 0
    down_payload: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    messages: int = 0

    def arrived(self, tensors: Tensors) -> None:
        """A worker's tensors have arrived."""
        for one in tensors.values():
            self.up_payload += one.nbytes
            self.up_floats += one.size if one.dtype == np.float32 else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ViSolution:
    """What a method has found.

    Args:
        point: z, float64 [n].
        error: of it; None if nobody knows.
        reached: whether that is at most the tolerance.
        iterations: that were made.
        step: gamma.
        seconds: of all iterations.
        traffic: what was sent.
        workers: M.
        curve: iteration, numbers that a worker has sent, error.
        judged: what the problem says of z.
    """

    point: np.ndarray
    error: float | None
    reached: bool
    iterations: int
    step: float
    seconds: float
    traffic: ViTraffic
    workers: int
    curve: Sequence[tuple[int, float, float]]
    judged: Mapping[str, float]

    @property
    def up_floats(self) -> float:
        """Numbers that a worker has sent."""
        return self.traffic.up_floats / self.workers


class _Workers(Protocol):
    """All workers, as the server sees them."""

    def collect(self, members: Sequence[int]) -> Mapping[int, Tensors]:
        """What each of some workers sends."""

    def broadcast(self, tensors: Tensors) -> None:
        """The mean goes to all."""


class _Here:
    """Workers in this process, one after the other; no socket."""

    def __init__(self, setting: ViSetting, step: float, traffic: ViTraffic) -> None:
        self._setting, self._traffic, self._number = setting, traffic, 0
        places = [setting.place(worker, step) for worker in range(setting.operator.workers)]
        self._steps = [setting.method.steps(one) for one in places]
        self._senders = [Sender(setting.seed, worker) for worker in range(len(places))]
        self._exchanges: list[MeanExchange] = [next(one) for one in self._steps]

    def collect(self, members: Sequence[int]) -> Mapping[int, Tensors]:
        self._number += 1
        arrived = {}
        for worker in members:
            one = self._exchanges[worker]
            tensors = self._senders[worker].encode(
                self._number, one.vector, one.up, feedback=one.feedback
            )
            self._traffic.arrived(tensors)
            arrived[worker] = tensors
        return arrived

    def broadcast(self, tensors: Tensors) -> None:
        setting = self._setting
        mean = received(
            setting.seed, self._number, self._exchanges[0], tensors, setting.operator.size
        )
        self._exchanges = [one.send(mean) for one in self._steps]


class _Processes:
    """Workers in processes of their own."""

    def __init__(self, star: Star, traffic: ViTraffic) -> None:
        self._star, self._traffic = star, traffic

    def collect(self, members: Sequence[int]) -> Mapping[int, Tensors]:
        arrived: dict[int, Tensors] = {}
        while len(arrived) < len(members):
            found = self._star.receive(_PATIENCE_S)
            if found is None:
                raise FederationError(f"no worker has answered in {_PATIENCE_S:g} s")
            worker, (tensors, _) = found
            if worker in arrived or worker not in members:
                raise FederationError(f"worker {worker} has sent a message out of turn")
            self._traffic.arrived(tensors)
            arrived[worker] = tensors
        return arrived

    def broadcast(self, tensors: Tensors) -> None:
        message = frame(tensors, {})
        for worker in range(len(self._star.settings)):
            self._star.send(worker, message)
        self._traffic.up_bytes = self._star.traffic.up
        self._traffic.down_bytes = self._star.traffic.down
        self._traffic.messages = self._star.traffic.messages


Watch = Callable[[int, float | None, float], bool]
"""Called after each iteration with its number, error, and numbers that a worker has sent.

What it returns ends the run if it is true.
"""


def follow(
    setting: ViSetting, step: float, workers: _Workers, traffic: ViTraffic, watch: Watch
) -> ViSolution:
    """The server's part of a run.

    Raises:
        ViError: it diverges.
    """
    place = setting.place(SERVER, step)
    operator, count = setting.operator, setting.operator.workers
    center = Center(setting.seed, count, operator.size)
    steps = setting.method.steps(place)
    most = _GROWTH * max(1.0, float(place.point @ place.point))
    curve: list[tuple[int, float, float]] = []
    begun, number, error = time.monotonic(), 0, operator.error(place.point)
    exchange = next(steps)
    while True:
        number += 1
        arrived = workers.collect(center.members(exchange))
        tensors, mean = center.mean(number, exchange, arrived)
        traffic.down_payload += count * sum(one.nbytes for one in tensors.values())
        workers.broadcast(tensors)
        before = place.iterations
        exchange = steps.send(mean)
        if place.iterations == before:
            continue
        error = operator.error(place.point)
        norm = float(place.point @ place.point)
        if not norm <= most or (error is not None and not error <= _WORSE):
            raise ViError(
                f"step = {step:g}: the method has diverged after {place.iterations} iterations; "
                f"give a smaller one{_advice(setting)}"
            )
        floats = traffic.up_floats / count
        if error is not None and place.iterations % max(1, setting.iterations // _POINTS) == 0:
            curve.append((place.iterations, floats, error))
        reached = error is not None and error <= setting.tolerance
        ends = watch(place.iterations, error, floats)
        if reached or ends or place.iterations >= setting.iterations:
            break
    seconds = time.monotonic() - begun
    return ViSolution(
        point=place.point, error=error, reached=reached, iterations=place.iterations, step=step,
        seconds=seconds, traffic=traffic, workers=count, curve=curve,
        judged=operator.judge(place.point),
    )  # fmt: skip


def _advice(setting: ViSetting) -> str:
    bound = setting.method.bound(setting.work())
    return "" if bound is None else f", such as the bound {bound:.3g}"


def _silent(*_: object) -> bool:
    return False


def solve_here(setting: ViSetting, watch: Watch = _silent) -> ViSolution:
    """Solve with workers in this process; the same numbers as with processes.

    Raises:
        ViError: the method does not fit the problem, or diverges.
    """
    step, traffic = setting.checked_step(), ViTraffic()
    return follow(setting, step, _Here(setting, step, traffic), traffic, watch)


@contextlib.contextmanager
def worker_processes(
    described: Mapping[str, Any], setting: ViSetting, step: float, links: Sequence[float]
) -> Iterator[Star]:
    """Processes that evaluate the operator.

    Args:
        described: problem, method and compressors, as JSON; see ``worker.py``.
        setting: the same, built.
        step: gamma.
        links: byte/s of each worker's link; 0 for no limit.
    """
    settings = [{**described, "step": step, "bytes_per_s": rate} for rate in links]
    with Star(
        "shoal.fields.federate.vi.worker", settings, 8 * setting.operator.size + 1024
    ) as star:
        yield star


def solve_over_sockets(
    described: Mapping[str, Any],
    links: Sequence[float],
    watch: Watch = _silent,
    **limits: Any,
) -> ViSolution:
    """Solve with a process for each worker.

    Args:
        described: see ``worker.py``.
        links: byte/s of each worker's link; 0 for no limit.
        watch: see :data:`Watch`.
        limits: ``step``, ``tolerance`` and ``iterations`` of :class:`ViSetting`.

    Raises:
        ViError: the method does not fit the problem, or diverges.
        FederationError: a worker has ended.
    """
    setting = built(described, **limits)
    step, traffic = setting.checked_step(), ViTraffic()
    with worker_processes(described, setting, step, links) as star:
        return follow(setting, step, _Processes(star, traffic), traffic, watch)


def solve_vi(
    problem: Any,
    *,
    method: Choice | str | Mapping[str, Any] = "masha1",
    workers: int = 4,
    compressor: Choice | str | Mapping[str, Any] = "rand_k",
    server_compressor: Choice | str | Mapping[str, Any] = "identity",
    step: float | None = None,
    tolerance: float = 1e-6,
    iterations: int = 10_000,
    seed: int = 0,
    processes: bool = False,
) -> ViSolution:
    """Solve a variational inequality.

    Args:
        problem: name of a problem, with its options; or an operator of your own
            (:class:`~shoal.fields.federate.vi.protocols.ViOperator`), which has its workers.
        method: how.
        workers: M, of a problem by name.
        compressor: of the workers.
        server_compressor: of what the server sends.
        step: gamma; None for the bound of the method.
        tolerance: error at which it ends.
        iterations: after which it ends in any case.
        seed: of everything that is drawn.
        processes: each worker is a process that talks over a socket; not for your own operator.

    Raises:
        ViError: the method does not fit the problem, or diverges.
    """
    limits: dict[str, Any] = {"step": step, "tolerance": tolerance, "iterations": iterations}
    if isinstance(problem, str | Mapping | Choice):
        described = described_as(problem, method, workers, compressor, server_compressor, seed)
        if processes:
            return solve_over_sockets(described, [0.0] * workers, **limits)
        return solve_here(built(described, **limits))
    if processes:
        raise ViError("processes: an operator of your own cannot be sent to them; run it here")
    up, down = (table("update_compressor").build(one) for one in (compressor, server_compressor))
    return solve_here(
        ViSetting(
            operator=problem,
            method=table("vi_method").build(method),
            up=up,
            down=down,
            seed=seed,
            **limits,
        )
    )
