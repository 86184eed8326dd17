"""A function on several ranks, each a process of its own: started, watched, and ended.

The ranks meet through a file, talk over Gloo, and run one function each, which is named, not
pickled: ``module:function`` or ``file.py:function``, called as ``function(comm, **arguments)``.
Arguments are plain JSON and values (jobs, models, machines), results are plain JSON. With one
thread a rank, times of different runs can be compared. This is what claims and tests use; a
training run has its own supervisor, in :mod:`shoal.train.supervise`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shoal.core import children, errors
from shoal.core.config import Value
from shoal.core.errors import ConfigError, RankError, rebuild, require
from shoal.core.files import write_json
from shoal.core.janitor import leave
from shoal.core.scratch import scratch_directory
from shoal.parallel.comm.heartbeat import Heartbeat, blame
from shoal.parallel.comm.silent import said, silent_links

_POLL_S = 0.02
# What a rank is given to report its error once a peer has failed.
_GRACE_S = 2.0
# Key of a value's class in a rank's arguments.
_VALUE = "value of"


class ProcessStarter(Protocol):
    """Starts a rank's process, as :meth:`shoal.machine.emulate.EmulatedNetwork.start` does."""

    def __call__(
        self,
        rank: int,
        command: Sequence[str],
        /,
        *,
        environment: Mapping[str, str],
        stdin: Any,
        stdout: Any,
        stderr: Any,
    ) -> subprocess.Popen[Any]:
        """Start ``command`` with ``environment`` on top of this process's own.

        Args:
            rank: which rank it is.
            command: program and arguments.
            environment: variables to set.
            stdin: as of :class:`subprocess.Popen`.
            stdout: the same.
            stderr: the same.
        """


def run_processes(
    target: str,
    world: int,
    arguments: Mapping[str, Any] | None = None,
    *,
    threads: int = 1,
    timeout_s: float = 120.0,
    collective_s: float | None = None,
    ranks_per_node: int | None = None,
    start: ProcessStarter | None = None,
) -> list[Any]:
    """Call ``target`` on ``world`` new processes and return what each of them returned.

    Args:
        target: ``module:function`` or ``path/to/file.py:function``; called as
            ``function(comm, **arguments)`` with a
            :class:`~shoal.parallel.comm.collectives.TorchComm`.
        world: number of ranks.
        arguments: keyword arguments, plain JSON and values; the same for all ranks.
        threads: threads of each rank.
        timeout_s: seconds after which the ranks must have ended; infinite for ranks that serve.
        collective_s: seconds after which a collective fails; ``timeout_s`` if not given.
        ranks_per_node: ranks of one node, neighbours by number; the bytes between nodes count
            with scope ``node``. All on one node if not given.
        start: starts the process of a rank on its host; here if not given. Ranks configured with
            several nodes or hosts do not share memory.

    Returns:
        Results by rank, as JSON.

    Raises:
        ConfigError: no such function, or arguments that are no JSON.
        ShoalError: what a rank reported, with its number; of its own class.
        RankError: a rank failed with another error, died, or hangs.
    """
    require(world >= 1, "processes.world", world, expected="at least 1")
    require(threads >= 1, "processes.threads", threads, expected="at least 1")
    require(timeout_s > 0, "processes.timeout_s", timeout_s, expected="more than 0")
    _split(target)
    with scratch_directory("ranks") as folder:
        ranks = _Processes(folder, target, world, timeout_s)
        try:
            given = {
                "target": target,
                "arguments": dict(arguments or {}),
                "world": world,
                "threads": threads,
                "timeout_s": timeout_s if collective_s is None else collective_s,
                "ranks_per_node": ranks_per_node,
                "shared_memory": start is None and ranks_per_node is None,
                "path": sys.path,
            }
            try:
                (ranks.folder / "task.json").write_text(json.dumps(given, default=_dumped))
            except TypeError as cause:
                raise ConfigError(
                    f"processes.arguments = {arguments!r}: expected plain JSON and values; {cause}"
                ) from cause
            for rank in range(world):
                ranks.start(rank, threads, start or _start_here)
            return ranks.wait()
        finally:
            ranks.end()


def _split(target: str) -> tuple[str, str]:
    """Module or file, and function.

    Raises:
        ConfigError: it names no function.
    """
    place, _, function = target.rpartition(":")
    require(
        bool(place) and function.isidentifier(),
        "processes.target",
        target,
        expected="module:function or file.py:function",
    )
    return place, function


def _start_here(
    rank: int,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    **options: Any,
) -> subprocess.Popen[Any]:
    # Ranks of one host talk over its own interface and no other.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    variables = children.environment({"GLOO_SOCKET_IFNAME": interface, **environment})
    return children.start_command(command, env=variables, **options)


class _Processes:
    """The processes of one call.

    Args:
        folder: where task, results, errors, stacks and logs lie.
        target: the function, for messages.
        world: number of ranks.
        timeout_s: how long they may take.
    """

    def __init__(self, folder: Path, target: str, world: int, timeout_s: float) -> None:
        self.folder = folder
        self.target = target
        self.world = world
        self.timeout_s = timeout_s
        self.processes: list[subprocess.Popen[Any]] = []

    def start(self, rank: int, threads: int, start: ProcessStarter) -> None:
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = children.command("shoal.parallel.comm.processes", str(self.folder), str(rank))
        with (self.folder / f"log-{rank}").open("wb") as log:
            self.processes.append(
                start(
                    rank,
                    command,
                    environment=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def wait(self) -> list[Any]:
        deadline = time.monotonic() + self.timeout_s
        while True:
            codes = [process.poll() for process in self.processes]
            if any(code not in (None, 0) for code in codes):
                self._explain_death()
            if all(code == 0 for code in codes):
                return [
                    json.loads((self.folder / f"result-{rank}.json").read_text())
                    for rank in range(self.world)
                ]
            if time.monotonic() > deadline:
                self._explain_hang()
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Kill what still runs, and whatever it started."""
        children.kill(self.processes)

    def _named(self, rank: int) -> str:
        return f"rank {rank} of {self.world}, in {self.target}"

    def _explain_death(self) -> None:
        # Let the peers' own errors arrive. A signal comes before an error, an error before a
        # lost peer, and the earlier before the later.
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and any(p.poll() is None for p in self.processes):
            time.sleep(_POLL_S)
        causes: list[tuple[int, float, int]] = []
        for rank, process in enumerate(self.processes):
            code = process.poll() or 0
            result = self._report_of(rank)
            if code < 0:
                causes.append((0, 0.0, rank))
            elif result is not None:
                causes.append((2 if result["type"] == "RankError" else 1, result["time"], rank))
            elif code > 0:
                causes.append((1, float("inf"), rank))
        kind, _, rank = min(causes)
        result = self._report_of(rank)
        if kind == 0 or result is None:
            code = self.processes[rank].poll() or 0
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with status {code}"
            )
            raise RankError(f"{self._named(rank)}, {how}{self._printed(rank)}")
        cls = getattr(errors, result["type"], None)
        if cls is not None:
            raise rebuild(cls, f"{self._named(rank)}: {result['message']}")
        raise RankError(
            f"{self._named(rank)}: {result['type']}: {result['message']} ({result['where']})"
        )

    def _explain_hang(self) -> None:
        running = [rank for rank, p in enumerate(self.processes) if p.poll() is None]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                self.processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(_GRACE_S / 4)
        beats = [Heartbeat.read(self.folder / f"rank-{rank}.beat", rank) for rank in running]
        present = [beat for beat in beats if beat is not None]
        silent = silent_links({rank: self.processes[rank].pid for rank in running})
        if silent and present:
            where = f"{blame(present).op or 'a collective'} in {self.target}"
            age_s = min(beat.age_s for beat in present)
            raise RankError(f"{said(silent, age_s, where)}; all ranks were ended")
        rank = blame(present).rank if present else running[0]
        stack = _read(self.folder / f"stack-{rank}").rpartition("Current thread")[2]
        lines = [line for line in stack.splitlines() if line.startswith("  File")][:8]
        raise RankError(
            f"{self._named(rank)}, hangs: not ended after {self.timeout_s:g} s"
            + ("; its stack:\n" + "\n".join(lines) if lines else self._printed(rank))
            + "\nall ranks were ended; timeout_s gives them longer"
        )

    def _report_of(self, rank: int) -> dict[str, Any] | None:
        text = _read(self.folder / f"error-{rank}.json")
        return dict(json.loads(text)) if text else None

    def _printed(self, rank: int) -> str:
        lines = _read(self.folder / f"log-{rank}").strip().splitlines()[-3:]
        return "; its last output: " + " | ".join(lines) if lines else "; it has no output"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _function(target: str) -> Callable[..., Any]:
    """The function that ``target`` names.

    Raises:
        ConfigError: there is none.
    """
    place, name = _split(target)
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None:
                raise ImportError(f"{place} is no Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        value: Callable[..., Any] = getattr(module, name)
    except (ImportError, OSError, AttributeError) as cause:
        raise ConfigError(
            f"processes.target = {target!r}: {cause}; name a function that a new process can import"
        ) from cause
    return value


def _dumped(value: Any) -> Any:
    """A value as JSON, with its class."""
    if not isinstance(value, Value):
        raise TypeError(f"{type(value).__name__} is neither")
    cls = type(value)
    return {_VALUE: [cls.__module__, cls.__qualname__], "fields": value.model_dump(mode="json")}


def _values(raw: Any) -> Any:
    """What :func:`_dumped` has written, as it was."""
    if isinstance(raw, list):
        return [_values(one) for one in raw]
    if not isinstance(raw, dict):
        return raw
    if _VALUE not in raw:
        return {key: _values(one) for key, one in raw.items()}
    module, name = raw[_VALUE]
    return getattr(importlib.import_module(module), name).model_validate(raw["fields"])


def _call(folder: Path, rank: int) -> Any:
    """Join the ranks, call the function, leave."""
    task = json.loads((folder / "task.json").read_text())
    sys.path[:] = task["path"]
    arguments = _values(task["arguments"])
    function = _function(task["target"])

    import torch

    from shoal.core.meter import Meter
    from shoal.parallel.comm.collectives import TorchComm

    torch.set_num_threads(task["threads"])
    with Meter([]) as meter:
        comm = TorchComm(
            meter,
            rank=rank,
            world=task["world"],
            timeout_s=task["timeout_s"],
            beats=folder,
            rendezvous=f"file://{folder / 'rendezvous'}",
            shared_memory=task["shared_memory"],
            ranks_per_node=task["ranks_per_node"],
        )
        result = function(comm, **arguments)
        # A rank that leaves early would take the messages with it that others still wait for.
        comm.barrier()
        comm.close()
    return result


def main() -> int:
    """One rank: ``python -m shoal.parallel.comm.processes FOLDER RANK``; returns its exit code."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    with (folder / f"stack-{rank}").open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        try:
            write_json(folder / f"result-{rank}.json", _call(folder, rank))
        # Whatever went wrong, the parent reports it.
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            fields = {
                "type": type(error).__name__,
                "message": str(error),
                "where": f"{frame.filename}:{frame.lineno}",
                "time": time.monotonic(),
            }
            write_json(folder / f"error-{rank}.json", fields)
            traceback.print_exc()
            return 1
        finally:
            faulthandler.disable()
            faulthandler.unregister(signal.SIGUSR1)
    return 0


if __name__ == "__main__":
    # Threads of a broken process group must not keep a rank alive.
    leave(main())
