"""Links of a chosen rate between network namespaces, where the machine lets one make them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.core.errors import MachineError
from shoal.machine import emulate as module
from shoal.machine.core_limit import unlimited
from shoal.machine.emulate import burst_bytes, emulate, sweep, unavailable

SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    connection, _ = server.accept()
    left = int(sys.argv[2])
    while left:
        left -= len(connection.recv(65536))
    connection.sendall(b"!")
"""
CLIENT = """
import socket, sys, time
for _ in range(500):
    try:
        connection = socket.create_connection((sys.argv[1], 7000), timeout=20)
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
begin = time.perf_counter()
connection.sendall(bytes(int(sys.argv[2])))
assert connection.recv(1) == b"!"
print(time.perf_counter() - begin)
"""
CRASH = """
import os, signal, subprocess
from shoal.machine.emulate import emulate
with emulate(1, bandwidth=1e6) as network:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    left = network.start(0, ["sleep", "1000"], **quiet)
    print(network.names[0], left.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def root():
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)


def namespaces():
    out = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return out.stdout


def test_a_transfer_takes_at_least_its_time(root):
    size, bandwidth = 1_000_000, 20e6 / 8
    with emulate(2, bandwidth=bandwidth) as network:
        names, address = network.names, network.addresses[0]
        assert all(name in namespaces() for name in names)
        _, client = network.run(
            [
                [sys.executable, "-c", SERVER, address, str(size)],
                [sys.executable, "-c", CLIENT, address, str(size)],
            ]
        )
        # Nothing is faster than its link: only what the bucket holds may pass at once.
        assert float(client.stdout) >= (size - burst_bytes(bandwidth)) / bandwidth
        sleeper = network.start(1, ["sleep", "1000"])
        assert sleeper.poll() is None
    assert sleeper.returncode == -signal.SIGKILL
    assert not any(name in namespaces() for name in names)


def test_every_direction_of_every_link_of_a_mesh_has_the_rate(root):
    size, bandwidth = 4_000_000, 8e6
    with emulate(3, bandwidth=bandwidth, packet=9000, mesh=True) as network:
        quiet = {"stdout": subprocess.PIPE, "text": True}
        servers = [
            network.start(to, [sys.executable, "-c", SERVER, network.addresses[to], str(size)])
            for to in range(3)
        ]
        # A ring: each host sends to the next one and receives from the one before.
        clients = [
            network.start(
                one,
                [sys.executable, "-c", CLIENT, network.addresses[(one + 1) % 3], str(size)],
                **quiet,
            )
            for one in range(3)
        ]
        seconds = [float(client.communicate(timeout=30)[0]) for client in clients]
        assert all(server.wait(10) == 0 for server in servers)
    assert all(0.9 * size / bandwidth < one < 1.6 * size / bandwidth for one in seconds)


def test_a_host_computes_on_its_share_of_a_core(root):
    reason = unlimited()
    if reason is not None:
        pytest.skip(reason)
    busy = "import time; b = time.perf_counter()\nwhile time.perf_counter() - b < 1: pass\n"
    busy += "print(time.process_time())"
    with emulate(1, bandwidth=1e6, cores=0.25) as network:
        groups = network.groups
        done = network.run([[sys.executable, "-c", busy]])
    assert float(done[0].stdout) < 0.5
    assert not any(group.exists() for group in groups)


def test_commands_see_the_emulated_interface_alone(root):
    with emulate(1, bandwidth=1e6) as network:
        show = [sys.executable, "-c", "import socket; print([n for _, n in socket.if_nameindex()])"]
        (done,) = network.run([show])
        assert "'eth0'" in done.stdout and "port" not in done.stdout
        assert network.environment["MASTER_ADDR"] == "10.77.0.1"


def test_a_failing_or_hanging_command_is_named(root):
    with emulate(2, bandwidth=1e6) as network:
        with pytest.raises(MachineError, match=r"host 1: .* failed: ZeroDivisionError"):
            network.run([["true"], [sys.executable, "-c", "1 / 0"]])
        with pytest.raises(MachineError, match=r"host 0: sleep 1000 did not end in 0\.1 s"):
            network.run([["sleep", "1000"]], timeout_s=0.1)
        with pytest.raises(MachineError, match="host = 2: expected 0 to 1"):
            network.start(2, ["true"])
        with pytest.raises(MachineError, match="is no program"):
            network.start(0, ["no-such-program"])
        names = network.names
    assert not any(name in namespaces() for name in names)


def test_what_a_killed_process_left_is_swept(root):
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    name, pid = done.stdout.split()
    assert name in namespaces()
    assert name in sweep()
    assert name not in namespaces()
    # It will be gone, or a zombie of whoever reaps orphans here: it was killed, and dies when it is
    # next scheduled.
    end = time.monotonic() + 30
    while time.monotonic() < end and _lives(pid):
        time.sleep(0.01)
    assert not _lives(pid)


def _lives(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] not in "ZX"


def test_says_why_it_cannot(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert unavailable() == "network namespaces need root, and this is user 1000; use sudo"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert unavailable() == "tc is not installed; install the package iproute2"
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")

    def refused(command, **_):
        return subprocess.CompletedProcess(
            command, 1, "", "mount --make-shared /run/netns failed: Operation not permitted\n"
        )

    monkeypatch.setattr(module.subprocess, "run", refused)
    assert "Operation not permitted; emulated links need root" in str(unavailable())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "this is darwin" in str(unavailable())


def test_bad_input():
    with (
        pytest.raises(MachineError, match="hosts = 0: expected 1 to 64"),
        emulate(0, bandwidth=1e6),
    ):
        pass
    for wrong in (0.0, 1e12):
        with pytest.raises(MachineError, match="bandwidth"), emulate(1, bandwidth=wrong):
            pass
    for packet in (100, 70000):
        with (
            pytest.raises(MachineError, match=rf"packet = {packet}: expected 576 to 16366 bytes"),
            emulate(1, bandwidth=1e6, packet=packet),
        ):
            pass
