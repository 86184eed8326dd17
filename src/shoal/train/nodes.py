"""What rank 0 has prepared, on the node of every rank: nodes may have disks of their own.

Rank 0 prepares a run in its own home and in its own directory of the run. The first rank of every
other node takes what is missing there (plan, tokenizer, tokens), checks it by its digest, builds
the kernels that the plan names, and says whether the run can work there. No rank goes on before
all nodes have answered, so what cannot work ends all ranks with one error that names the node.

Small things travel through the store in which the ranks meet, files over a connection of their
own to rank 0, which asks for a secret that only the store knows. What goes over it is not
encrypted, like all that ranks send to each other: the network must be trusted.

Two things are not sent. Checkpoints need one place that all nodes see, since each rank saves its
part there; and a directory of weights must lie at the same path on every node. Both are checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from shoal.checkpoint.remote import is_address
from shoal.core.errors import CheckpointError, ConfigError, DataError, RankError, ShoalError
from shoal.core.files import shoal_home, write_atomic, write_json
from shoal.corpora.tokens import TokenFile, files_of, receive
from shoal.ir import TrainPlan
from shoal.train.build import is_directory
from shoal.train.layout import RunDir
from shoal.train.start import FILE as START
from shoal.train.start import open_start

PREPARE_LIMIT = timedelta(minutes=30)
"""How long nodes wait for each other: the corpus may be large."""

_PIECE_BYTES = 2**20
_SILENCE_S = 60.0
_MAX_REQUEST_BYTES = 512
# A file system over the network may show a new file a little later elsewhere.
_VISIBLE_S = 10.0


class RendezvousStore(Protocol):
    """The rendezvous store of the ranks, with the interface of :class:`torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None:
        """Keep a value."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value and return it."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until there are values."""


@dataclass(frozen=True, kw_only=True)
class RunNode:
    """A node of a run, as a rank on it sees it.

    Args:
        first: this rank is the first of its node, which prepares it for the others.
        address: of the node of rank 0.
    """

    number: int
    nodes: int
    first: bool
    address: str


def give(plan: TrainPlan, directory: RunDir, gate: RendezvousStore, node: RunNode) -> None:
    """Give a prepared run to the other nodes, on rank 0; returns when all are ready.

    Raises:
        RankError: the run cannot work on a node; says which and why.
    """
    if node.nodes == 1:
        gate.set("prepared", "{}")
        gate.set("ready", "{}")
        return
    tokens = tokens_of(directory)
    files = [*files_of(tokens)]
    run = [
        name for name in ("plan.yaml", "tokenizer.json", START) if (directory.root / name).exists()
    ]
    nonce, secret = secrets.token_hex(8), secrets.token_hex(32)
    model = plan.job.model
    start = open_start(directory.root)
    with contextlib.ExitStack() as undo:
        for place in _places(plan, directory):
            place.mkdir(parents=True, exist_ok=True)
            mark = place / f".nodes-{nonce}"
            write_atomic(mark, nonce)
            undo.callback(mark.unlink, missing_ok=True)
        port = undo.enter_context(_serving(tokens, [file.file for file in files], secret))
        gate.set(
            "prepared",
            json.dumps(
                {
                    "run": {name: (directory.root / name).read_text() for name in run},
                    "tokens": tokens.name,
                    "files": [file.model_dump(mode="json") for file in files],
                    "model": digest_of(Path(model)) if is_directory(model) else None,
                    "start": None if start is None else _digest_of_meta(start.meta),
                    "nonce": nonce,
                    "port": port,
                    "secret": secret,
                }
            ),
        )
        keys = [f"node/{number}" for number in range(1, node.nodes)]
        _wait(gate, keys, "the other nodes to take what rank 0 has prepared")
        said = [json.loads(gate.get(key)) for key in keys]
    wrong = [
        f"node {n} ({it['host']}): {it['error']}" for n, it in enumerate(said, 1) if it["error"]
    ]
    error = "; ".join(wrong)
    gate.set("ready", json.dumps({"error": error}))
    if error:
        raise RankError(error)


def refuse(gate: RendezvousStore, error: ShoalError) -> None:
    """Say to all ranks that rank 0 could not prepare the run."""
    gate.set("prepared", json.dumps({"error": str(error)}))


def take(directory: RunDir, gate: RendezvousStore, node: RunNode, *, resume: bool) -> None:
    """Wait for what rank 0 has prepared, on every other rank; the first of a node takes it.

    Raises:
        RankError: rank 0 could not prepare the run, or it cannot work on some node.
    """
    _wait(gate, ["prepared"], "rank 0 to prepare the run")
    data = json.loads(gate.get("prepared"))
    if "error" in data:
        raise RankError(f"rank 0 could not prepare the run: {data['error']}")
    if node.number and node.first:
        error = ""
        try:
            _take(data, directory, node, resume=resume)
        except (ShoalError, OSError) as cause:
            error = str(cause)
        gate.set(f"node/{node.number}", json.dumps({"host": socket.gethostname(), "error": error}))
    _wait(gate, ["ready"], "all nodes to be prepared")
    if error := json.loads(gate.get("ready")).get("error"):
        raise RankError(error)


def tokens_of(directory: RunDir) -> Path:
    """The tokens of a prepared run on this node.

    The directory of the run may be shared where homes are not, so a token set of that name in
    the home of this node comes first.
    """
    path = Path(json.loads(directory.tokens.read_text())["path"])
    own = shoal_home() / "corpora" / path.name
    return own if own.is_dir() else path


def digest_of(directory: Path) -> str:
    """SHA-256 over names and bytes of the weights and settings in a model directory."""
    names = sorted(path for kind in ("*.safetensors", "*.json") for path in directory.glob(kind))

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=8) as threads:
        result = threads.map(digest, names)
        lines = [f"{path.name} {text}" for path, text in zip(names, result, strict=True)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _take(message: dict[str, Any], directory: RunDir, node: RunNode, *, resume: bool) -> None:
    """Bring this node to where rank 0's is.

    Raises:
        ShoalError: the run cannot work here.
    """
    from shoal.train.planning import with_kernels

    for name, text in message["run"].items():
        path = directory.root / name
        if path.exists() and path.read_text() == text:
            continue
        if name == "plan.yaml" and path.exists() and not resume:
            raise ConfigError(
                f"{directory.root}: contains another run; remove it on this node, or choose "
                "another name with --set name=..."
            )
        write_atomic(path, text)
    plan = TrainPlan.load(directory.plan)
    _check_places(plan, directory, message["nonce"])
    _check_model(plan, message["model"])
    start = open_start(directory.root)
    if (None if start is None else _digest_of_meta(start.meta)) != message["start"]:
        raise CheckpointError(
            f"{directory.root / START}: the checkpoint to begin from is another one here than on "
            "rank 0; put it where all nodes see it, or give an address such as s3://bucket/run"
        )

    def fetch(name: str) -> Iterator[bytes]:
        return _fetched(node.address, message["port"], message["secret"], name)

    files = [TokenFile.model_validate(raw) for raw in message["files"]]
    tokens = receive(message["tokens"], files, fetch)
    if not directory.tokens.exists() or tokens_of(directory).name != message["tokens"]:
        write_json(directory.tokens, {"path": str(tokens.path.absolute())})
    if with_kernels(plan).job.kernel != plan.job.kernel:
        raise ConfigError(
            f"kernel: this node would take {with_kernels(plan).job.kernel}, and the plan says "
            f"{plan.job.kernel}; plan with kernels that all nodes have, such as "
            "--set kernel.rms_norm=torch"
        )


def _places(plan: TrainPlan, directory: RunDir) -> list[Path]:
    """Directories in which every rank's part must come together."""
    job = plan.job
    results = [Path(place) for place in directory.levels_of(job) if not is_address(place)]
    return [*results, directory.dumps] if job.checkpoint.dump else results


def _check_places(plan: TrainPlan, directory: RunDir, nonce: str) -> None:
    for place in _places(plan, directory):
        end = time.monotonic() + _VISIBLE_S
        while not (place / f".nodes-{nonce}").exists():
            if time.monotonic() > end:
                raise CheckpointError(
                    f"{place}: this node does not see what rank 0 writes there, and every rank "
                    "saves its part of a checkpoint; set checkpoint.path to a directory that all "
                    "nodes mount at the same path, or to an address such as s3://bucket/run"
                    + ("; leave checkpoint.dump out" if place == directory.dumps else "")
                )
            time.sleep(0.1)


def _check_model(plan: TrainPlan, digest: str | None) -> None:
    model = plan.job.model
    here = digest_of(Path(model)) if is_directory(model) else None
    if here != digest:
        what = (
            "is missing on this node" if here is None else "has other weights here than on rank 0"
        )
        raise ConfigError(
            f"model = {model}: {what}; copy the directory to the same path on every node, or to a "
            "file system that all of them mount"
        )


def _digest_of_meta(meta: object) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True, default=str).encode()).hexdigest()


def _wait(gate: RendezvousStore, keys: list[str], what: str) -> None:
    """Wait for keys of the store.

    Raises:
        RankError: they did not come in time, or the store is gone.
    """
    try:
        gate.wait(keys, PREPARE_LIMIT)
    except RuntimeError as cause:  # of torch: DistStoreError, DistNetworkError
        raise RankError(
            f"waited {PREPARE_LIMIT} for {what}: {str(cause).splitlines()[0]}; see the first "
            f"error of another rank"
        ) from cause


@contextlib.contextmanager
def _serving(folder: Path, names: Sequence[str], secret: str) -> Iterator[int]:
    """Send the named files of a directory to who knows the secret, while the block lasts."""

    class Handler(socketserver.StreamRequestHandler):
        timeout = _SILENCE_S

        def handle(self) -> None:
            line = self.rfile.readline(_MAX_REQUEST_BYTES).decode("ascii", "replace").split()
            if len(line) != 2 or not hmac.compare_digest(line[0], secret) or line[1] not in names:
                return
            with (folder / line[1]).open("rb") as file:
                self.connection.sendfile(file)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            """A node that went away in between says so itself, by the digest that is missing."""

    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0))
    server = Server(listener.getsockname(), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    listener.listen(Server.request_queue_size)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.shutdown()
        server.server_close()


def _fetched(host: str, port: int, secret: str, name: str) -> Iterator[bytes]:
    """The bytes of one file of rank 0.

    Raises:
        DataError: rank 0 cannot be reached.
    """
    try:
        with socket.create_connection((host, port), timeout=_SILENCE_S) as connection:
            connection.sendall(f"{secret} {name}\n".encode())
            while piece := connection.recv(_PIECE_BYTES):
                yield piece
    except OSError as cause:
        raise DataError(
            f"{name}: cannot be taken from rank 0 at {host}, port {port} ({cause}); let the nodes "
            "reach each other on all ports, or set SHOAL_HOME to a directory that all of them mount"
        ) from cause
