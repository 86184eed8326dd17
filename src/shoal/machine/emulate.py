"""Emulated hosts: network namespaces of this machine, joined by links of a chosen rate.

Every host is a network namespace with one interface, ``eth0``; a switch, a namespace of its own,
joins them. What a host sends is held to the rate where it leaves, and what it receives where the
switch hands it on (token buckets, ``tbf``), so a host has the rate once in each direction, as
behind a network card. Delay is not emulated. Hosts share file system, memory and cores: ranks
that are to use the network must not know that they share a host, and every packet takes a
little of the time in which they compute, so the fewer there are, the more it is as with a card.
Instead of a switch there may be a mesh: a link between every two hosts, and each host has the rate
once in each direction of each of its links.

Nothing is changed outside these namespaces. They are taken down at the end, with everything that
runs in them, also after the process that made them was killed: their names carry its number.

Needs root, and ``ip`` and ``tc`` of iproute2; :func:`unavailable` says what is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core import children
from shoal.core.errors import MachineError, require
from shoal.core.janitor import clean_up_with, wait_for_end
from shoal.machine.core_limit import core_limit, set_control, sweep_groups

INTERFACE = "eth0"
# Addresses of the hosts; they are not visible outside the namespaces.
_SUBNET = "10.77.0"
_MOST_HOSTS = 64
# A full queue drops packets, and TCP slows down: so long a wait is allowed in front of the bucket.
_QUEUE_S = 0.05
_SMALLEST_BURST = 16 * 1024
# What IPv4 allows, and of Ethernet's own bytes the most that a frame has.
_SMALLEST_PACKET, _LARGEST_PACKET, _HEADER = 576, 65535, 18
_NAMES = re.compile(r"^shoal-(\d+)-\d+-(?:switch|\d+)$")
_NUMBERS = itertools.count()
_TIMEOUT_S = 30.0


def burst_bytes(bandwidth: float) -> int:
    """Bytes that may pass at once after a pause, at ``bandwidth`` byte/s: 2 ms of it."""
    return max(_SMALLEST_BURST, int(0.002 * bandwidth))


def unavailable() -> str | None:
    """Why this machine cannot emulate links, and what would help; None if it can."""
    if sys.platform != "linux":
        return f"network namespaces are a part of Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"network namespaces need root, and this is user {os.geteuid()}; use sudo"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed; install the package iproute2"
    try:
        with emulate(1, bandwidth=1e6):
            return None
    except MachineError as cause:
        return str(cause)


def sweep() -> list[str]:
    """Take down the namespaces that processes which no longer live have left behind.

    Returns:
        Their names.
    """
    results = []
    for name in _namespaces():
        match = _NAMES.match(name)
        if match and not Path(f"/proc/{match.group(1)}").exists():
            _take_down(name)
            results.append(name)
    sweep_groups(results)
    return results


class EmulatedNetwork:
    """Hosts that are up. Made by :func:`emulate`.

    Args:
        names: the namespace of each host.
        bandwidth: byte/s of a host in each direction; of each of its links in a mesh.

    Attributes:
        groups: control group of each host; none where hosts have all cores.
    """

    def __init__(self, names: Sequence[str], bandwidth: float) -> None:
        self.names = tuple(names)
        self.bandwidth = bandwidth
        self.groups: list[Path] = []
        self._started: list[subprocess.Popen[Any]] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        """IPv4 address of each host."""
        return tuple(f"{_SUBNET}.{host + 1}" for host in range(len(self.names)))

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which ranks meet at the first host, over the emulated interface."""
        return {
            "MASTER_ADDR": self.addresses[0],
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
        }

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a process on a host; it is killed when the network is taken down.

        Args:
            host: number of the host.
            command: program and arguments.
            environment: set on top of this process's and :attr:`environment`.
            options: of :class:`subprocess.Popen`.

        Raises:
            MachineError: no such host, or no such program.
        """
        require(
            0 <= host < len(self.names),
            "host",
            host,
            expected=f"0 to {len(self.names) - 1}",
            error=MachineError,
        )
        if not command or shutil.which(command[0]) is None:
            raise MachineError(
                f"host {host}: {' '.join(command) or 'no command'!r} is no program that can be "
                "found; give its path"
            )
        process = children.start_command(
            ["ip", "netns", "exec", self.names[host], *command],
            env=children.environment({**self.environment, **(environment or {})}),
            **options,
        )
        self._started.append(process)
        if self.groups:
            set_control(self.groups[host] / "cgroup.procs", str(process.pid))
        return process

    def reshape(self, host: int, bandwidth: float, *, sends: bool) -> None:
        """Give what a host sends, or receives, another rate from now on; not in a mesh.

        Args:
            host: number of the host.
            bandwidth: byte/s.
            sends: what it sends; else what it receives.

        Raises:
            MachineError: no such host, or it cannot be done.
        """
        name, interface = self._port(host)
        if sends:
            name, interface = self.names[host], INTERFACE
        _shape(name, interface, bandwidth, verb="replace")

    def plug(self, host: int, *, into: bool) -> None:
        """Pull the cable of a host, or plug it in again; its users are not informed.

        Raises:
            MachineError: no such host, or it cannot be done.
        """
        switch, port = self._port(host)
        _ip("-n", switch, "link", "set", port, "up" if into else "down")

    def _port(self, host: int) -> tuple[str, str]:
        """Switch and interface there at which a host hangs."""
        require(
            0 <= host < len(self.names),
            "host",
            host,
            expected=f"0 to {len(self.names) - 1}",
            error=MachineError,
        )
        return f"{self.names[host].rpartition('-')[0]}-switch", f"port{host}"

    def run(
        self, commands: Sequence[Sequence[str]], *, timeout_s: float = 60.0
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run command i on host i, all at once, and return when all have ended.

        Raises:
            MachineError: one failed, with the end of what it said, or did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as files:
            # Into files: a full pipe would hold up a host that others wait for.
            said = [
                (
                    files.enter_context(tempfile.TemporaryFile("w+")),
                    files.enter_context(tempfile.TemporaryFile("w+")),
                )
                for _ in commands
            ]
            running = [
                self.start(host, command, stdout=out, stderr=err)
                for host, (command, (out, err)) in enumerate(zip(commands, said, strict=True))
            ]
            done = []
            for host, (process, texts) in enumerate(zip(running, said, strict=True)):
                what = f"host {host}: {' '.join(commands[host])}"
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired as cause:
                    raise MachineError(f"{what} did not end in {timeout_s:g} s") from cause
                for text in texts:
                    text.seek(0)
                out, err = (text.read() for text in texts)
                if process.returncode:
                    last = (err.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
                    raise MachineError(f"{what} failed: {last}")
                done.append(subprocess.CompletedProcess(process.args, 0, out, err))
        return done

    def stop(self) -> None:
        """Kill what was started here and still runs."""
        children.kill(self._started)
        for process in self._started:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._started.clear()


@contextlib.contextmanager
def emulate(
    hosts: int,
    *,
    bandwidth: float,
    packet: int = 1500,
    mesh: bool = False,
    cores: float | None = None,
) -> Iterator[EmulatedNetwork]:
    """Hosts joined by a switch, each with ``bandwidth`` in each direction, while the block lasts.

    Args:
        hosts: how many.
        bandwidth: byte/s.
        packet: largest packet, bytes. With segments put together by the network card a host handles
            up to 65,536 at once, with jumbo frames 9,000, with neither 1,500.
        mesh: a link between every two hosts with ``bandwidth`` in each direction, and no switch.
        cores: on how many a host computes, such as a half; on all if not given.

    Raises:
        MachineError: it cannot be done here; says which step failed and why.
    """
    require(
        1 <= hosts <= _MOST_HOSTS,
        "hosts",
        hosts,
        expected=f"1 to {_MOST_HOSTS}",
        error=MachineError,
    )
    require(
        1e3 <= bandwidth <= 1e10,
        "bandwidth",
        bandwidth,
        expected="1e3 to 1e10 byte/s",
        error=MachineError,
    )
    # A larger one would be cut before it passes the token bucket.
    most = min(_LARGEST_PACKET, burst_bytes(bandwidth) - _HEADER)
    require(
        _SMALLEST_PACKET <= packet <= most,
        "packet",
        packet,
        expected=f"{_SMALLEST_PACKET} to {most} bytes at this bandwidth",
        error=MachineError,
    )
    sweep()
    clean_up_with("shoal.machine.emulate")
    base = f"shoal-{os.getpid()}-{next(_NUMBERS)}"
    switch = f"{base}-switch"
    names = [f"{base}-{host}" for host in range(hosts)]
    network = EmulatedNetwork(names, bandwidth)
    with contextlib.ExitStack() as undo:
        for name in names if mesh else (switch, *names):
            _ip("netns", "add", name)
            undo.callback(_take_down, name)
            _ip("-n", name, "link", "set", "lo", "up")
        if cores is not None:
            network.groups = [undo.enter_context(core_limit(name, cores)) for name in names]
        (_mesh if mesh else _switched)(network, switch, packet)
        undo.callback(network.stop)
        yield network


def _switched(network: EmulatedNetwork, switch: str, packet: int) -> None:
    """Join hosts by a switch."""
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for host, (name, address) in enumerate(zip(network.names, network.addresses, strict=True)):
        port = f"port{host}"
        _ip(
            *("-n", switch, "link", "add", port, "type", "veth"),
            *("peer", "name", INTERFACE, "netns", name),
        )
        _ip("-n", switch, "link", "set", port, "master", "bridge")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
        for where, interface in ((switch, port), (name, INTERFACE)):
            _ip("-n", where, "link", "set", interface, "mtu", str(packet), "up")
            _shape(where, interface, network.bandwidth)


def _mesh(network: EmulatedNetwork, switch: str, packet: int) -> None:
    """Join every two hosts; the interface with a host's address carries nothing."""
    for name, address in zip(network.names, network.addresses, strict=True):
        _ip("-n", name, "link", "add", INTERFACE, "type", "bridge")
        _ip("-n", name, "address", "add", f"{address}/32", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")
    for pair in itertools.combinations(range(len(network.names)), 2):
        one, other = (network.names[host] for host in pair)
        _ip(
            *("-n", one, "link", "add", f"to{pair[1]}", "type", "veth"),
            *("peer", "name", f"to{pair[0]}", "netns", other),
        )
        for host, peer in (pair, pair[::-1]):
            name, link = network.names[host], f"to{peer}"
            _ip("-n", name, "link", "set", link, "mtu", str(packet), "up")
            _ip(
                *("-n", name, "route", "add", f"{network.addresses[peer]}/32", "dev", link),
                *("src", network.addresses[host]),
            )
            _shape(name, link, network.bandwidth)


def _shape(name: str, interface: str, bandwidth: float, *, verb: str = "add") -> None:
    burst = burst_bytes(bandwidth)
    _call(
        *("tc", "-n", name, "qdisc", verb, "dev", interface, "root", "tbf"),
        *("rate", f"{max(1, round(8 * bandwidth))}bit", "burst", f"{burst}b"),
        *("limit", f"{burst + int(_QUEUE_S * bandwidth)}b"),
    )


def _take_down(name: str) -> None:
    """End what still runs in a namespace, and delete it."""
    try:
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)
    except MachineError:
        # Two processes may sweep at once; what the other has taken down is down.
        if name in _namespaces():
            raise


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _call(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as cause:
        raise MachineError(
            f"{command[0]} is not installed; install the package iproute2"
        ) from cause
    except subprocess.TimeoutExpired as cause:
        raise MachineError(f"{' '.join(command)}: no answer in {_TIMEOUT_S:g} s") from cause
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
        raise MachineError(f"{' '.join(command)}: {said}; emulated links need root on Linux")
    return done.stdout


if __name__ == "__main__":
    wait_for_end(int(sys.argv[1]))
    sweep()
