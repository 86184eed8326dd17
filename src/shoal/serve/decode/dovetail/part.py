"""The drafter on the weak accelerator, the target on the host: two processes and a narrow way.

Only token numbers and hidden states cross it, never weights. Verifying on a host costs by the row,
so trees are small, and the drafter may be deep; what memory it leaves on the accelerator takes the
target's first layers.

Source: Zhang et al., Dovetail: A CPU/GPU Heterogeneous Speculative Decoding for LLM inference,
2025.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from shoal.core import children
from shoal.core.config import Kind
from shoal.core.errors import ServeError, require
from shoal.core.parts import Choice, part
from shoal.ir import MAX_NODES, DrafterCalibration, Expectation, ServeJob
from shoal.memory.tiers.mover import EmulatedLink
from shoal.plan.trees.auto import AutoTree
from shoal.serve.decode.dovetail.wire import (
    HEAD_BYTES,
    SPIN_S,
    Channel,
    MessageHeader,
    MessageKind,
    draft_bytes,
    verdict_bytes,
)
from shoal.serve.decode.draft.part import check_tree
from shoal.serve.decode.protocols import AcceptedTokens, Guess, Needs, TokenTree, branches
from shoal.serve.decode.trained import TrainedSpeculator
from shoal.serve.engine.frames import PRIVATE
from shoal.serve.ranks.spinning import spin_briefly

if TYPE_CHECKING:
    from shoal.ir import Request
    from shoal.model.transformer import Transformer
    from shoal.serve.cache.paged import PagedCache
    from shoal.serve.decode.dovetail.layers import LaterCache, LaterLayers

# How long a drafter may take to say that it is ready.
_START_S = 60.0
# Trees whose times are remembered.
_REMEMBERED = 256
# How long its exit code is waited for once its end is closed.
_EXIT_S = 1.5


@part
class DovetailSpeculative(TrainedSpeculator):
    """A feature drafter (``job: drafter`` with ``drafter: dovetail``) in a separate process.

    Args:
        path: its directory.
        depth: number of draft tokens in a path.
        breadth: nodes of each level that are expanded.
        nodes: largest number of draft tokens that are verified, the most probable ones.
        draft_device: device of the drafter.
        cores: cores to which its process is pinned; empty for no pinning.
        target_layers: first layers of the target that are computed there too, or ``auto``, which
            takes as many as fit in ``memory_cap``. The host then has neither their weights nor
            their cache, and the hidden states of a step's rows are sent once.
        memory_cap: largest number of bytes of weights and cache there, of drafter and layers; 0 for
            no limit.
        overlap: draft from its own best path while the target verifies.
        link_s: s by which each message is delayed, to emulate a slower link.
        link_bytes_per_s: byte/s of the emulated link; 0 for no limit.
        weights: format of the drafter's matrices, such as int8-g64, where the inference kernels
            compute it; a coarser format lowers the acceptance rate a little and changes no token.
        accept: how draft tokens are accepted.
    """

    path: str
    depth: int = 5
    breadth: int = 4
    nodes: Annotated[int, Ge(1)] = 10
    draft_device: str = "cpu"
    cores: tuple[int, ...] = ()
    target_layers: int | Literal["auto"] = 0
    memory_cap: Annotated[int, Ge(0)] = 0
    overlap: bool = False
    link_s: Annotated[float, Ge(0)] = 0.0
    link_bytes_per_s: Annotated[float, Ge(0)] = 0.0
    weights: str = "plain"
    accept: Annotated[Choice, Kind("accept")] = Choice(name="sample_match")
    kind: ClassVar[str] = "dovetail"

    def __post_init__(self) -> None:
        where = "speculative.dovetail"
        check_tree("dovetail", self.depth, self.breadth, self.nodes)
        layers = self.target_layers
        if layers == "auto":
            require(self.memory_cap > 0, f"{where}.target_layers", layers,
                    expected="a number of layers, or auto with a memory_cap")  # fmt: skip
        else:
            require(layers >= 0, f"{where}.target_layers", layers, expected="0 or more, or auto")
        require(
            not self.link_s or self.link_bytes_per_s > 0,
            f"{where}.link_bytes_per_s",
            self.link_bytes_per_s,
            expected="above 0 with link_s",
        )

    def expects(self) -> Expectation:
        config = self.config()
        rows = tuple(row[: self.breadth] for row in config.calibration[: self.depth])
        tokens = AutoTree(nodes=self.nodes).build(DrafterCalibration(rows)).expected()
        weights = sum(file.stat().st_size for file in Path(self.path).glob("*.safetensors"))
        copies = 2.0 * config.vocab_size * config.hidden
        return Expectation(tokens=tokens, weight_bytes=weights + copies, reads=self.depth)

    def drafter(self, job: ServeJob, model: Transformer) -> DovetailDrafter:
        """See :class:`~shoal.serve.decode.protocols.Speculator`.

        Raises:
            ModelError: the drafter is of another kind, or for another model or tokenizer.
            ConfigError: it does not fit in ``memory_cap`` with the target's layers, or cannot have
                ``weights`` here.
            ServeError: its process cannot be started.
        """
        from shoal.serve.decode.dovetail.small_device import placed

        config, state = self.stored(job)
        room = placed(self, job, model, int(config.options.get("layers", 1)), state)
        target, dtype = model.config, model.weight.dtype
        fields = {
            "path": str(Path(self.path).resolve()),
            "model": str(Path(job.model).resolve()),
            "dtype": str(dtype).removeprefix("torch."),
            "itemsize": dtype.itemsize,
            "hidden": target.hidden,
            "device": self.draft_device,
            "depth": self.depth,
            "breadth": self.breadth,
            "limit": job.max_position or target.max_position,
            "overlap": self.overlap,
            "fast": room.fast,
            "target_layers": room.target_layers,
            "ready": model.head is not None,
            "weights": self.weights,
            "job": job.model_dump(mode="json"),
            "cores": list(self.cores),
            "link": [self.link_bytes_per_s, self.link_s] if self.link_bytes_per_s else None,
        }
        return DovetailDrafter(fields, self.nodes, room.nbytes)


@dataclass
class _Known:
    """Of one request: its number with the drafter, and how many of its tokens that one has."""

    request: Request
    number: int
    length: int = 0


class DovetailDrafter:
    """The verifier's side of a drafter in another process.

    Args:
        told: arguments of that process, see :mod:`~shoal.serve.decode.dovetail.worker`.
        nodes: most nodes of a tree.
        nbytes: of the drafter's weights and of what it keeps of one request.

    Raises:
        ServeError: it cannot be started.

    Attributes:
        hidden: width of a hidden state.
        itemsize: bytes of one of its numbers.
        target_layers: first layers of the target that are computed there.
        expected_bytes: that must have crossed the way by the formula.
        drafts: passes and s reported by the drafter for each of the last trees; 0 for a tree that
            was drafted ahead.
    """

    needs: ClassVar[Needs] = "all"

    def __init__(self, settings: dict[str, Any], nodes: int, nbytes: int) -> None:
        self._nodes, self._bytes = nodes, nbytes
        self.target_layers = settings["target_layers"]
        self.hidden, self.itemsize = settings["hidden"], settings["itemsize"]
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._numbers = 0
        self.drafts: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self.expected_bytes = HEAD_BYTES
        own, theirs = socket.socketpair()
        environment = children.environment(without=PRIVATE)
        spin_briefly(environment)
        with theirs:
            self.process = children.start(
                "shoal.serve.decode.dovetail.worker",
                *("--fd", str(theirs.fileno()), "--settings", json.dumps(settings)),
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
            )
        self._end = own
        self._closing = weakref.finalize(self, _close, own, self.process)
        link = EmulatedLink(*settings["link"]) if settings["link"] else None
        self.channel = Channel(own, link, SPIN_S if settings["cores"] else 0.0)
        own.settimeout(_START_S)
        with self._alive():
            head = self.channel.head()
            if head.kind == MessageKind.FAILED:
                words = self.channel.body(head.a).decode(errors="replace")
                self.process.wait()
                raise ServeError(f"the drafter cannot be loaded: {words}")
        own.settimeout(None)

    @contextlib.contextmanager
    def _alive(self) -> Any:
        """What is done while the drafter must live.

        Raises:
            ServeError: it has died; names its exit code.
        """
        try:
            yield
        except (OSError, EOFError) as cause:
            try:
                end = f"ended with exit code {self.process.wait(timeout=_EXIT_S)}"
            except subprocess.TimeoutExpired:
                end = f"does not answer ({cause})"
            raise ServeError(
                f"the drafter (process {self.process.pid}) {end}; restart the server, or serve "
                "without speculative"
            ) from None

    def tell(self, head: MessageHeader, body: bytes = b"") -> None:
        with self._alive():
            self.channel.send(head, body)

    def left(self, model: Transformer, cache: PagedCache) -> tuple[LaterLayers, LaterCache]:
        from shoal.serve.decode.dovetail.layers import FirstLayers, LaterCache, LaterLayers

        later = LaterCache(
            FirstLayers(self, self.target_layers), cache.config, cache.num_blocks, cache.block_size,
            dtype=cache.dtype, device=cache.device, form=cache.form,
        )  # fmt: skip
        return LaterLayers(model, self.target_layers), later

    def states(self, rows: int) -> bytes:
        with self._alive():
            head = self.channel.head()
            if head.kind != MessageKind.STATES or head.a != rows:
                raise EOFError(
                    f"a message of kind {head.kind} where states of {rows} rows were due"
                )
            return self.channel.body(rows * self.hidden * self.itemsize)

    def close(self) -> None:
        """End the drafter's process."""
        self._closing()

    def _of(self, request: Request) -> _Known:
        known = self._known.get(request.id)
        if known is None or known.request is not request:
            self._numbers += 1
            if known is not None:
                self._forget(known)
            known = self._known[request.id] = _Known(request, self._numbers)
            while len(self._known) > 128:
                _, old = self._known.popitem(last=False)
                self._forget(old)
        self._known.move_to_end(request.id)
        return known

    def _forget(self, known: _Known) -> None:
        self.tell(MessageHeader(MessageKind.DROP, known.number))
        self.expected_bytes += HEAD_BYTES

    def observe(self, seen: Sequence[AcceptedTokens]) -> None:
        """Send the drafter what is certain, with its features."""
        import numpy as np
        import torch

        for one in seen:
            known = self._of(one.request)
            skip = known.length - one.start
            if one.hidden is None or skip < 0 or skip >= len(one.tokens):
                continue  # its beginning was cached and never computed here, or is known already
            tokens = one.tokens[skip:]
            hidden = one.hidden[skip:].contiguous().cpu()
            body = np.array(tokens, dtype=np.uint32).tobytes()
            body += hidden.view(torch.uint8).numpy().tobytes()
            root = 0 if one.root is None else one.root + 1
            head = MessageHeader(MessageKind.VERDICT, known.number, known.length, len(tokens), root)
            self.tell(head, body)
            known.length += len(tokens)
            self.expected_bytes += verdict_bytes(len(tokens), self.hidden, self.itemsize)

    def propose(self, guesses: Sequence[Guess]) -> list[TokenTree | None]:
        requests = []
        for guess in guesses:
            known, place = self._of(guess.request), len(guess.request.tokens)
            ready = known.length == place - 1
            requests.append(ready)
            if ready:
                nodes = min(self._nodes, guess.nodes)
                self.tell(MessageHeader(MessageKind.ASK, known.number, place, nodes))
        results: list[TokenTree | None] = []
        for guess, ready in zip(guesses, requests, strict=True):
            tree = self._draft(guess.request) if ready else None
            results.append(tree)
            if ready:
                self.expected_bytes += draft_bytes(0 if tree is None else tree.nodes)
        return results

    def _draft(self, request: Request) -> TokenTree | None:
        import numpy as np

        with self._alive():
            head = self.channel.head()
            if head.kind != MessageKind.DRAFT or head.b > MAX_NODES:
                raise EOFError(f"a message of kind {head.kind} where a draft was due")
            if not head.b:
                return None
            self.drafts.append((head.c, 1e-6 * head.d))
            tokens = np.frombuffer(self.channel.body(4 * head.b), dtype=np.uint32)
            parents = np.frombuffer(self.channel.body(head.b), dtype=np.uint8)
        return TokenTree(
            np.array([request.tokens[-1], *tokens.tolist()]), branches((-1, *parents.tolist()))
        )

    @property
    def level_s(self) -> float:
        """Median s of a level, of the trees of late; 0 before there was one."""
        each = [seconds / passes for passes, seconds in self.drafts if passes]
        return statistics.median(each) if each else 0.0

    @property
    def tree_s(self) -> float:
        """Median s of a tree that was not there already, of late; 0 before there was one."""
        whole = [seconds for passes, seconds in self.drafts if passes]
        return statistics.median(whole) if whole else 0.0

    @property
    def link_bytes(self) -> int:
        """Bytes that crossed the way, in both directions."""
        return self.channel.sent + self.channel.received

    def memory_bytes(self) -> int:
        return self._bytes


def _close(end: Any, process: Any) -> None:
    """Hang up; the drafter leaves by itself, or is ended."""
    end.close()
    try:
        process.wait(timeout=_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
