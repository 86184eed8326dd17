"""Ranks on the nodes of a Ray cluster, each the child of an actor.

Ray places the actors by what a rank needs and notices when a node is lost. The ranks themselves
are the processes that torchrun starts, with the same variables, so they compute the same numbers
bit for bit and share what rank 0 has prepared in the same way. The actor of rank 0 has the store
in which they meet. A rank ends with its actor, and an actor with the process that asked for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shlex
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from shoal.core import children, errors
from shoal.core.errors import ConfigError, RankError, ShoalError, rebuild
from shoal.core.parts import part
from shoal.core.pool import ActorResources
from shoal.core.pool.ray import RayPool
from shoal.ir import TrainPlan, TrainReport
from shoal.train.layout import RunDir

if TYPE_CHECKING:
    from shoal.core.pool.ray import RayActor, RayWorkers
    from shoal.train.run import Watch

_POLL_S = 0.25
# After the first failure, the others may report the cause.
_GRACE_S = 2.0


@part
class Ray:
    """Start the ranks as actors of a Ray cluster; the ranks of a lost node move to another node.

    Args:
        address: address of a running cluster (``auto`` finds it); empty uses ``$RAY_ADDRESS`` or,
            if that is not set, starts a cluster on this machine for the duration of the run.
        cpus_per_rank: processors that Ray reserves for a rank; 0 for the number of threads of the
            job.
        room_s: s that a rank waits for a node with free resources.
    """

    address: str = ""
    cpus_per_rank: Annotated[float, Ge(0)] = 0.0
    room_s: Annotated[float, Ge(0)] = 120.0

    def files(self, plan: TrainPlan) -> dict[str, str]:
        """``launch.sh``, to be started on a node of the cluster."""
        name = shlex.quote(plan.job.name)
        script = f"""#!/bin/sh
# Start {plan.job.name} on the Ray cluster at $RAY_ADDRESS, or the one of this machine.
set -eu
export RAY_ADDRESS="${{RAY_ADDRESS:-auto}}"
exec shoal train --plan plan.yaml --dir runs/{name} --resume --launch ray
"""
        return {"launch.sh": script}

    def run(
        self,
        plan: TrainPlan,
        run_dir: Path,
        *,
        resume: bool = False,
        start: str | None = None,
        restarts: int = 0,
        watch: Watch | None = None,
    ) -> TrainReport:
        """Run a plan on the cluster; see :class:`~shoal.train.protocols.Starter`.

        Rank 0 runs on this machine if it is a node with room for it; events and report lie where
        rank 0 runs.

        Raises:
            MissingExtraError: Ray is not installed.
            ShoalError: the run cannot start, or a rank failed.
        """
        job = plan.job
        needs = ActorResources(
            cpus=self.cpus_per_rank or float(job.threads or 1),
            gpus=1.0 if plan.machine.device.kind == "gpu" else 0.0,
        )
        with RayPool(address=self.address, room_s=self.room_s).open(needs) as pool:
            return _run(pool, plan, run_dir, resume, start, restarts, watch or _unwatched)


def _run(
    pool: RayWorkers,
    plan: TrainPlan,
    run_dir: Path,
    resume: bool,
    start: str | None,
    restarts: int,
    watch: Watch,
) -> TrainReport:
    """Run a plan on a pool, again after a lost rank if that is allowed."""
    while True:
        task = {
            "plan": plan.model_dump(mode="json", exclude_none=True),
            "dir": str(run_dir.absolute()),
            "resume": resume,
            "start": start,
        }
        with contextlib.closing(_Ranks(pool, task)) as ranks:
            try:
                ranks.start(plan.job.parallel.world, plan.job.threads)
                return ranks.wait(watch)
            except RankError as error:
                if restarts <= 0 or ranks.stopping is not None:
                    raise
                restarts, resume = restarts - 1, True
                watch({"kind": "restart", "message": str(error)})


def _unwatched(event: dict[str, Any]) -> None:
    """Discard an event."""


class _Ranks:
    """The ranks of one attempt.

    Args:
        pool: of their actors.
        task: what each is to run.

    Attributes:
        stopping: what has asked the ranks to save and stop.
    """

    def __init__(self, pool: RayWorkers, task: Mapping[str, Any]) -> None:
        self._pool, self._task = pool, task
        self._actors: list[RayActor] = []
        self._failed: dict[int, tuple[int, ShoalError]] = {}
        self.stopping: KeyboardInterrupt | None = None

    def start(self, world: int, threads: int | None) -> None:
        """Place the ranks and start them.

        Raises:
            RankError: no node has room for one, or it cannot be started.
        """
        with ThreadPoolExecutor(max_workers=min(world, 32)) as several:
            placing = [several.submit(self._pool.actor, _Rank) for _ in range(world)]
        placed: list[RayActor] = []
        error: BaseException | None = None
        for one in placing:
            error = error or one.exception()
            if one.exception() is None:
                placed.append(one.result())
        self._actors = placed
        if error is not None:
            raise error
        # Ranks of a node are neighbours, and those of this machine come first.
        here, order = self._pool.address, {actor.address: 0 for actor in placed}
        order = {
            address: n for n, address in enumerate(sorted(order, key=lambda a: (a != here, a)))
        }
        self._actors = sorted(placed, key=lambda actor: order[actor.address])
        sizes = Counter(actor.address for actor in self._actors)
        seen = [actor.call("gpus") for actor in self._actors]
        gpus: dict[str, list[str]] = {address: [] for address in sizes}
        for actor, its in zip(self._actors, seen, strict=True):
            gpus[actor.address] += its.result()
        port = self._actors[0].call("host_store", world).result()
        common = {
            "WORLD_SIZE": str(world),
            # As many ranks as are certainly neighbours on every node.
            "LOCAL_WORLD_SIZE": str(math.gcd(*sizes.values())),
            "GROUP_WORLD_SIZE": str(len(sizes)),
            "MASTER_ADDR": self._actors[0].address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "ray",
            "TOKENIZERS_PARALLELISM": "false",
        }
        local: Counter[str] = Counter()
        started = []
        for number, actor in enumerate(self._actors):
            own = {
                "RANK": str(number),
                "LOCAL_RANK": str(local[actor.address]),
                "GROUP_RANK": str(order[actor.address]),
            }
            if gpus[actor.address]:
                own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[actor.address])
            if threads:
                own["OMP_NUM_THREADS"] = own["MKL_NUM_THREADS"] = str(threads)
            local[actor.address] += 1
            one_node = len(sizes) == 1
            environment = {**common, **own}
            started.append(
                actor.call("start", self._task, environment, None if one_node else actor.address)
            )
        for future in started:
            future.result()

    def wait(self, watch: Watch) -> TrainReport:
        """Return the report when every rank has ended well.

        A first KeyboardInterrupt in here asks the ranks to save and stop, and is raised again
        once they have. A second one ends them.

        Raises:
            KeyboardInterrupt: the run was stopped.
            ShoalError: what the first rank to fail has reported.
        """
        ended, request, stepped = 0.0, 0.0, False
        running = set(range(len(self._actors)))
        report: TrainReport | None = None
        while running:
            try:
                for number, state in self._states(running):
                    for event in state.events:
                        if event["kind"] == "report":
                            report = TrainReport.model_validate(event["report"])
                        elif event["kind"] == "failed":
                            self._fail(number, event["type"], event["message"])
                        else:
                            stepped = stepped or event["kind"] == "step"
                            watch(event)
                    if state.code is not None:
                        running.discard(number)
                        if state.code:
                            self._died(number, state.code, state.said)
                if self._failed:
                    ended = ended or time.monotonic()
                    if time.monotonic() - ended > _GRACE_S or not running:
                        raise min(self._failed.values(), key=lambda found: found[0])[1]
                # Before the first step there is nothing to save, and not all can receive it.
                if self.stopping and not stepped and time.monotonic() - request > _GRACE_S:
                    raise self.stopping
                time.sleep(_POLL_S)
            except KeyboardInterrupt as stop:
                if self.stopping is not None:
                    raise
                self.stopping, request = stop, time.monotonic()
                for number in running:
                    self._actors[number].call("terminate")
        if self.stopping is not None:
            raise self.stopping
        if report is None:
            raise RankError("rank 0 ended without a report")
        return report

    def _states(self, running: set[int]) -> list[tuple[int, _State]]:
        """What became of the ranks since the last question."""
        requests = [(number, self._actors[number].call("state")) for number in sorted(running)]
        states = []
        for number, future in requests:
            try:
                states.append((number, future.result()))
            except RankError as cause:
                running.discard(number)
                address = self._actors[number].address
                lost = RankError(f"rank {number} ({address}) is lost with its actor: {cause}")
                self._failed.setdefault(number, (0, lost))
        return states

    def _fail(self, number: int, kind: str, message: str) -> None:
        cls = getattr(errors, kind, RankError)
        text = message.removeprefix(f"rank {number}: ")
        order = 3 if issubclass(cls, RankError) else 1  # what others say of a lost one comes last
        where = f"rank {number} ({self._actors[number].address}): "
        self._failed[number] = (order, rebuild(cls, where + text))

    def _died(self, number: int, code: int, said: str) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        words = f"; its last output:\n{said}" if said else ""
        error = RankError(f"rank {number} ({self._actors[number].address}) {how}{words}")
        self._failed.setdefault(number, (0 if code < 0 else 2, error))

    def close(self) -> None:
        """End what still runs."""
        for actor in self._actors:
            actor.close()


@dataclass
class _State:
    """What a rank did since the last question: events, its exit status, its last words."""

    events: list[dict[str, Any]]
    code: int | None
    said: str


class _Rank:
    """The actor of a rank, on its node."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._store: object = None
        self._log = Path()
        self._reader: threading.Thread | None = None

    def gpus(self) -> list[str]:
        """The GPUs that Ray keeps for this rank."""
        return [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]

    def host_store(self, world: int) -> int:
        """Open the store in which the ranks meet; returns its port."""
        import torch.distributed as dist

        store = dist.TCPStore(  # type: ignore[attr-defined]
            "0.0.0.0",  # noqa: S104 - the others are on other nodes
            0,
            world,
            is_master=True,
            wait_for_workers=False,
        )
        self._store = store
        return int(store.port)

    def start(
        self, task: Mapping[str, Any], environment: Mapping[str, str], address: str | None
    ) -> None:
        """Start the rank.

        Args:
            task: what it is to run.
            environment: which rank it is.
            address: of this node, over which it talks to others; None for ranks of one node.
        """
        directory, number = RunDir(Path(task["dir"])), int(environment["RANK"])
        directory.ranks.mkdir(parents=True, exist_ok=True)
        self._log = directory.log(number)
        known = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
        if address is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            known = dict.fromkeys(known, _interface(address))
        with self._log.open("ab") as log:
            self._process = children.start(
                "shoal.train.torchrun",
                env={**known, **children.environment(environment)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        self._process.stdin.flush()  # and it stays open: the rank ends when it is closed
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), daemon=True
        )
        self._reader.start()

    def _read(self, lines: IO[bytes]) -> None:
        for line in lines:
            self._events.put(json.loads(line))

    def state(self) -> _State:
        """What it did since this was asked last."""
        assert self._process is not None and self._reader is not None
        code = self._process.poll()
        if code is not None:
            self._reader.join()
        events = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        said = (
            "" if not code else "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])
        )
        return _State(events, code, said)

    def terminate(self) -> None:
        """Ask it to save and stop."""
        assert self._process is not None
        self._process.terminate()


def _interface(address: str) -> str:
    """The network interface of this node that has an address.

    Raises:
        ConfigError: none has it.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    raise ConfigError(
        f"no network interface has the address {address} of this Ray node; start it with "
        "ray start --node-ip-address and an address that the other nodes reach, or set "
        "GLOO_SOCKET_IFNAME"
    )
