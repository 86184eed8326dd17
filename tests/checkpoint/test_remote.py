"""Checkpoints in memory and in S3 (moto's server): the same promises as on a disk."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stored import META, ThreadPeers, on_ranks, split, tensors

from shoal.checkpoint import SAVE_MODES, remote
from shoal.checkpoint.peers import SinglePeer
from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError, ConfigError, CorruptError


@pytest.fixture
def memory() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


def fs_of(store: Store) -> Any:
    return store.storage._fs  # type: ignore[attr-defined]


def files(store: Store) -> list[str]:
    return sorted(fs_of(store).find(store.storage._root))  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", list(SAVE_MODES))
def test_saved_elsewhere_is_loaded_from_there(mode: str, memory: str) -> None:
    store = Store(memory, keep=2)
    saver = SAVE_MODES.build(mode).build(store, SinglePeer())
    for step in (1, 2, 3):
        saver.save(step, tensors(step), META).wait(30)
    saver.close()
    assert store.steps() == (2, 3)
    latest = Store(memory).latest()
    assert latest is not None and latest.step == 3 and latest.meta["seed"] == 7
    for name, tensor in tensors(3).items():
        assert torch.equal(latest.tensor(name), tensor)
    assert str(latest.path).startswith(memory)
    assert {path.rsplit("/", 1)[1] for path in files(store)} == {
        "index.json",
        "rank-00000.json",
        "rank-00000.safetensors",
    }


def test_ranks_share_it_and_reshard(memory: str) -> None:
    whole = torch.randn(9, 4)
    store = Store(memory)

    def work(peers: ThreadPeers) -> None:
        saver = SAVE_MODES.build("snapshot").build(store, peers)
        saver.save(1, {"w": split(whole, 0, 3)[peers.rank], "same": whole}, META)
        saver.close()

    assert on_ranks(3, work) == [None] * 3
    saved = store.open(1)
    assert torch.equal(saved.tensor("w", (1, 1), (7, 2)), whole[1:8, 1:3])
    assert torch.equal(saved.tensor("same"), whole)


def test_a_step_saved_again_replaces_it(memory: str) -> None:
    store = Store(memory)
    store.save(1, tensors(1), META)
    store.save(1, tensors(2), META)
    saver = SAVE_MODES.build("snapshot").build(store, SinglePeer())
    saver.save(1, tensors(3), META).wait(30)
    saver.close()
    assert store.steps() == (1,)
    assert torch.equal(store.open(1).tensor("model.w"), tensors(3)["model.w"])
    assert len(files(store)) == 3


def test_what_an_interrupted_save_left_is_no_checkpoint_and_is_removed(memory: str) -> None:
    store = Store(memory)
    store.save(1, tensors(1), META)
    left = f"{store.storage._root}/step-00000002.x/rank-00000.safetensors"  # type: ignore[attr-defined]
    fs_of(store).pipe_file(left, b"half")
    assert store.steps() == (1,)
    store.save(3, tensors(3), META)
    assert left not in files(store)


def test_damage_is_named_and_the_previous_step_offered(memory: str) -> None:
    store = Store(memory)
    for step in (1, 2):
        store.save(step, tensors(step), META)
    path = next(p for p in files(store) if "step-00000002" in p and p.endswith("safetensors"))
    raw = bytearray(fs_of(store).cat_file(path))
    raw[-1] ^= 1
    fs_of(store).pipe_file(path, bytes(raw))
    with pytest.raises(CorruptError, match=r"'model\.b' in memory://.*step 1 in .* is intact"):
        store.open(2)
    fs_of(store).rm_file(path)
    with pytest.raises(CorruptError, match=r"rank-00000\.safetensors: missing"):
        store.open(2)


def test_a_second_run_is_refused_and_a_dead_one_is_not(memory: str) -> None:
    saver = SAVE_MODES.build("snapshot").build(Store(memory), SinglePeer())
    with pytest.raises(CheckpointError, match="another process is saving here"):
        SAVE_MODES.build("snapshot").build(Store(memory), SinglePeer())
    saver.close()
    store = Store(memory)
    lease = f"{store.storage._root}/.writer.json"  # type: ignore[attr-defined]
    dead = {"id": "x", "host": __import__("socket").gethostname(), "pid": 2**22 + 1, "at": 1e12}
    fs_of(store).pipe_file(lease, json.dumps(dead).encode())
    SAVE_MODES.build("snapshot").build(store, SinglePeer()).close()


@pytest.mark.parametrize("clock_s", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize("runs", [True, False])
def test_a_writer_of_another_host_runs_while_it_renews_its_lease(
    memory: str, monkeypatch: pytest.MonkeyPatch, clock_s: float, runs: bool
) -> None:
    monkeypatch.setattr(remote, "_LEASE_S", 12.0 if runs else 0.1)
    store = Store(memory)
    lease = f"{store.storage._root}/.writer.json"  # type: ignore[attr-defined]
    over = threading.Event()

    def say() -> None:
        while True:
            # The other host's clock is apart from this one's by so many seconds.
            writer = {"id": "x", "host": "elsewhere", "pid": 1, "at": time.time() + clock_s}
            fs_of(store).pipe_file(lease, json.dumps(writer).encode())
            if over.wait(0.02) or not runs:
                return

    say_it = threading.Thread(target=say)
    say_it.start()
    if not runs:
        say_it.join()
    try:
        if runs:
            with pytest.raises(CheckpointError, match="on elsewhere"):
                SAVE_MODES.build("snapshot").build(store, SinglePeer())
        else:
            SAVE_MODES.build("snapshot").build(store, SinglePeer()).close()
    finally:
        over.set()
        say_it.join()


def test_nobody_knows_the_way() -> None:
    with pytest.raises(ConfigError, match=r"give a directory or an address such as s3://"):
        Store("nowhere://x/y")


class Proxy:
    """Lets requests through to moto, or breaks them.

    Attributes:
        fault: "", "500" for every upload, or "short" for one of which half arrives.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.fault = ""
        self.broken = 0

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        upload = environ["REQUEST_METHOD"] == "PUT" and "safetensors" in environ["PATH_INFO"]
        if self.fault and upload:
            self.broken += 1
            size = int(environ.get("CONTENT_LENGTH") or 0)
            body = environ["wsgi.input"].read(size)
            if self.fault == "short":
                half = {"wsgi.input": io.BytesIO(body[: size // 2]), "CONTENT_LENGTH": size // 2}
                return self.app({**environ, **half}, start)
            start("500 Internal Server Error", [("Content-Type", "text/xml")])
            return [b"<Error><Code>InternalError</Code><Message>no</Message></Error>"]
        return self.app(environ, start)


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[str, Proxy]]:
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    from werkzeug.serving import make_server

    proxy = Proxy(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = make_server("127.0.0.1", 0, proxy, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    patch = pytest.MonkeyPatch()
    for key, value in settings.items():
        patch.setenv(key, value)
    patch.setattr(remote, "_SILENCE_S", 0.5)
    import fsspec

    fsspec.filesystem("s3").mkdir("bucket")
    yield f"s3://bucket/{uuid.uuid4().hex}", proxy
    patch.undo()
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_s3_in_parts_and_back(s3: tuple[str, Proxy]) -> None:
    address, _ = s3
    store = Store(address + "/parts", keep=1)
    large = {"model.w": torch.randn(12_000_000)}  # 48 MB: two parts
    saver = SAVE_MODES.build("lazy").build(store, SinglePeer())
    for step in (1, 2):
        saver.before_update()
        saver.save(step, {**large, "model.step": torch.tensor(step)}, META).wait(60)
    saver.close()
    assert store.steps() == (2,)
    saved = store.open(2)
    assert torch.equal(saved.tensor("model.w", (11_999_000,), (1000,)), large["model.w"][-1000:])
    assert int(saved.tensor("model.step")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["500", "short"])
@pytest.mark.parametrize("mode", ["blocking", "lazy"])
def test_s3_that_fails_mid_upload_is_told_and_the_old_one_stays(
    fault: str, mode: str, s3: tuple[str, Proxy]
) -> None:
    address, proxy = s3
    store = Store(f"{address}/{fault}-{mode}")
    saver = SAVE_MODES.build(mode).build(store, SinglePeer())
    saver.save(1, tensors(1), META).wait(60)
    proxy.fault = fault
    try:
        ticket = saver.save(2, tensors(2), META)
        saver.before_update()
        with pytest.raises(CheckpointError, match="step 2 cannot be saved"):
            ticket.wait(60)
    finally:
        proxy.fault = ""
    assert proxy.broken
    saver.save(3, tensors(3), META).wait(60)
    saver.close()
    assert store.steps() == (1, 3)
    assert torch.equal(store.open(1).tensor("model.w"), tensors(1)["model.w"])


class Wire(threading.Thread):
    """A wire to a server that breaks in the middle of an upload.

    Args:
        port: of the server.

    Attributes:
        fault: "", "cut" for connections that end, or "silent" for those on which nothing comes.
        after: bytes of a connection that still arrive.
    """

    def __init__(self, port: int) -> None:
        super().__init__()
        self.server, self.fault, self.after = port, "", 2**20
        self.broken = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.ends: list[socket.socket] = []
        self.carriers: list[threading.Thread] = []
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.server))
                self.ends += [client, server]
                for ends, up in (((client, server), True), ((server, client), False)):
                    carrier = threading.Thread(target=self.carry, args=(*ends, up))
                    self.carriers.append(carrier)
                    carrier.start()

    def carry(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                passed += len(data)
                if not (up and self.fault and passed > self.after):
                    target.sendall(data)
                    continue
                self.broken += 1
                if self.fault == "cut":
                    break
        end(source)
        end(target)

    def stop(self) -> None:
        end(self.listener)
        self.join()
        for one in self.ends:
            end(one)
        for carrier in self.carriers:
            carrier.join()
        for one in (self.listener, *self.ends):
            one.close()


def end(one: socket.socket) -> None:
    """End a connection; whoever waits on it wakes up."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "mode"), [("cut", "lazy"), ("silent", "blocking")])
def test_s3_that_stops_mid_upload_is_told_in_bounded_time(
    fault: str, mode: str, s3: tuple[str, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _ = s3
    host = os.environ["AWS_ENDPOINT_URL"]
    wire = Wire(int(host.rpartition(":")[2]))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{wire.port}")
    # Clients are kept by their options, of which the endpoint is none.
    clients = pytest.importorskip("s3fs").S3FileSystem
    clients.clear_instance_cache()
    monkeypatch.setattr(remote, "_PART_BYTES", 5 * 2**20)
    large = {"model.w": torch.randn(4_000_000)}  # four parts
    store = Store(f"{address}/{fault}-{mode}-wire")
    saver = SAVE_MODES.build(mode).build(store, SinglePeer())
    saver.save(1, large, META).wait(60)
    wire.fault = fault
    begin = time.monotonic()
    try:
        ticket = saver.save(2, large, META)
        saver.before_update()
        with pytest.raises(CheckpointError, match="step 2 cannot be saved"):
            ticket.wait(60)
    finally:
        wire.fault = ""
    # Some seconds of silence for each of two tries, of two clients on top of each other.
    assert wire.broken and time.monotonic() - begin < 30
    saver.save(3, large, META).wait(60)
    saver.close()
    assert store.steps() == (1, 3)
    assert torch.equal(store.open(3).tensor("model.w"), large["model.w"])
    wire.stop()
    clients.clear_instance_cache()
