"""The drafter on the weak accelerator, the target on the host: two processes and a narrow way.

Only token numbers and hidden states of accepted tokens cross it, never weights. Verifying on a
host costs by the row, so trees are small, and the drafter may be deep.

Source: Zhang et al., Dovetail: A CPU/GPU Heterogeneous Speculative Decoding for LLM inference,
2025.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from shoal.core.config import Kind as PartKind
from shoal.core.errors import ConfigError, ServeError, require
from shoal.core.parts import Choice, part
from shoal.ir import MAX_NODES, Calibration, Expectation, ServeJob
from shoal.serve.decode.draft_model import check_tree

if TYPE_CHECKING:
    from shoal.ir import Request
    from shoal.model.transformer import Transformer
    from shoal.serve.decode.protocols import Guess, Needs, Seen, TokenTree

__all__ = ["Dovetail", "DovetailDrafter"]

# How long a drafter may take to say that it is ready.
_START_S = 60.0
# Trees whose times are remembered.
_REMEMBERED = 256
# How long its exit code is waited for once its end is closed.
_EXIT_S = 1.5


@part
class Dovetail:
    """A feature drafter (``job: drafter`` with ``drafter: dovetail``) in a process of its own.

    Args:
        path: its directory.
        depth: tokens that it looks ahead.
        breadth: nodes that each level goes on from.
        nodes: most guesses that are verified, the most probable ones.
        draft_device: where the drafter computes.
        cores: cores that its process is held to; none for any.
        memory_cap: most bytes of the drafter's weights and cache there; 0 for no cap.
        overlap: let it go on from its own best path while the target verifies.
        link_s: s that each message is held up, to emulate a slower way.
        link_bytes_per_s: bandwidth of that way; 0 leaves messages as fast as they are.
        weights: format of the drafter's matrices, such as int8-g64, where it is computed by the
            kernels of inference; a coarser one guesses a little worse, and changes no token.
        accept: which guesses hold.
    """

    path: str
    depth: int = 5
    breadth: int = 4
    nodes: int = 10
    draft_device: str = "cpu"
    cores: tuple[int, ...] = ()
    memory_cap: int = 0
    overlap: bool = False
    link_s: float = 0.0
    link_bytes_per_s: float = 0.0
    weights: str = "plain"
    accept: Annotated[Choice, PartKind("accept")] = Choice(name="sample_match")

    def __post_init__(self) -> None:
        where = "speculative.dovetail"
        check_tree("dovetail", self.depth, self.breadth, self.nodes)
        require(self.nodes >= 1, f"{where}.nodes", self.nodes, expected=f"1 to {MAX_NODES}")
        for name in ("memory_cap", "link_s", "link_bytes_per_s"):
            value = getattr(self, name)
            require(value >= 0, f"{where}.{name}", value, expected="0 (none) or more")
        require(
            not self.link_s or self.link_bytes_per_s > 0,
            f"{where}.link_bytes_per_s",
            self.link_bytes_per_s,
            expected="above 0 with link_s",
        )

    def expects(self) -> Expectation:
        """See :class:`~shoal.serve.decode.protocols.Speculator`."""
        from pathlib import Path

        from shoal.plan.trees.auto import Auto
        from shoal.serve.decode.trained import config_of

        config = config_of("dovetail", Path(self.path))
        rows = tuple(row[: self.breadth] for row in config.calibration[: self.depth])
        tokens = Auto(nodes=self.nodes).build(Calibration(rows)).expected()
        weights = sum(file.stat().st_size for file in Path(self.path).glob("*.safetensors"))
        copies = 2.0 * config.vocab_size * config.hidden
        return Expectation(tokens=tokens, weight_bytes=weights + copies, reads=self.depth)

    def drafter(self, job: ServeJob, model: Transformer) -> DovetailDrafter:
        """See :class:`~shoal.serve.decode.protocols.Speculator`.

        Raises:
            ModelError: the drafter is of another kind, or for another model or tokenizer.
            ConfigError: it does not fit in ``memory_cap``, or cannot have ``weights`` here.
            ServeError: its process cannot be started.
        """
        from pathlib import Path

        import torch

        from shoal.serve.decode.dovetail_trees import tree_room
        from shoal.serve.decode.fast_dovetail import fits
        from shoal.serve.decode.taped_dovetail import kept_places
        from shoal.serve.decode.trained import stored

        config, state = stored("dovetail", Path(self.path), job)
        target, limit = model.config, job.max_position or model.config.max_position
        dtype, itemsize = model.weight.dtype, model.weight.element_size()
        layers = int(config.options.get("layers", 1))
        place = 2 * layers * target.num_kv_heads * target.head_dim
        longest = limit + tree_room(self.depth, self.breadth)
        words, net = target.vocab_size * target.hidden, sum(one.numel() for one in state.values())
        # Kernels of inference want the head in an order of their own, and the gate by tokens.
        nbytes = itemsize * (net + (1 if target.tied else 2) * words + place * longest)
        quick = itemsize * (net + 3 * words + place * kept_places(job, longest))
        fast = fits(target, dtype, torch.device(self.draft_device))
        fast = fast and not job.exact and (not self.memory_cap or quick <= self.memory_cap)
        if self.memory_cap and nbytes > self.memory_cap:
            raise ConfigError(
                f"speculative.dovetail.memory_cap = {self.memory_cap}: the drafter with {layers} "
                f"layers and the copies of embedding and head takes {nbytes} bytes; give at least "
                "that, or train a drafter with fewer layers"
            )
        if self.weights != "plain" and not fast:
            raise ConfigError(
                f"speculative.dovetail.weights = {self.weights}: the drafter is computed without "
                "the kernels of inference here (another device or precision, exact, or a "
                f"memory_cap under {quick} bytes); give weights: plain"
            )
        told = {
            "path": str(Path(self.path).resolve()),
            "model": str(Path(job.model).resolve()),
            "dtype": str(dtype).removeprefix("torch."),
            "itemsize": itemsize,
            "hidden": target.hidden,
            "device": self.draft_device,
            "depth": self.depth,
            "breadth": self.breadth,
            "limit": limit,
            "overlap": self.overlap,
            "fast": fast,
            "weights": self.weights,
            "job": job.model_dump(mode="json"),
            "cores": list(self.cores),
            "link": [self.link_bytes_per_s, self.link_s] if self.link_bytes_per_s else None,
        }
        return DovetailDrafter(told, self.nodes, quick if fast else nbytes)


@dataclass
class _Known:
    """Of one request: its number with the drafter, and how many of its tokens that one has."""

    request: Request
    number: int
    length: int = 0


class DovetailDrafter:
    """The verifier's side of a drafter in another process.

    Args:
        told: what that process is told, see :mod:`~shoal.serve.decode.dovetail_worker`.
        nodes: most nodes of a tree.
        nbytes: of the drafter's weights and of what it keeps of one request.

    Raises:
        ServeError: it cannot be started.

    Attributes:
        hidden: width of a hidden state.
        itemsize: bytes of one of its numbers.
        expected_bytes: that must have crossed the way by the formula.
        drafts: passes and s of the drafter for each of the last trees, as it said; a tree that was
            drafted ahead took none.
    """

    needs: ClassVar[Needs] = "all"

    def __init__(self, told: dict[str, Any], nodes: int, nbytes: int) -> None:
        import json
        import os
        import socket
        import subprocess
        import sys
        import weakref

        from shoal.memory.mover import EmulatedLink
        from shoal.serve.decode.dovetail_wire import HEAD_BYTES, SPIN_S, Channel, Kind
        from shoal.serve.spinning import spin_briefly

        self._nodes, self._bytes = nodes, nbytes
        self.hidden, self.itemsize = told["hidden"], told["itemsize"]
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._numbers = 0
        self.drafts: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self.expected_bytes = HEAD_BYTES
        own, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name != "SHOAL_API_KEY"}
        spin_briefly(environment)
        command = [sys.executable, "-m", "shoal.serve.decode.dovetail_worker"]
        command += ["--fd", str(theirs.fileno()), "--told", json.dumps(told)]
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._end = own
        self._closing = weakref.finalize(self, _close, own, self.process)
        link = EmulatedLink(*told["link"]) if told["link"] else None
        self.channel = Channel(own, link, SPIN_S if told["cores"] else 0.0)
        own.settimeout(_START_S)
        with self._alive():
            head = self.channel.head()
            if head.kind == Kind.FAILED:
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
        import subprocess

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
        from shoal.serve.decode.dovetail_wire import HEAD_BYTES, Head, Kind

        with self._alive():
            self.channel.send(Head(Kind.DROP, known.number))
        self.expected_bytes += HEAD_BYTES

    def observe(self, seen: Sequence[Seen]) -> None:
        """Tell the drafter what is certain, with its features."""
        import numpy as np
        import torch

        from shoal.serve.decode.dovetail_wire import Head, Kind, verdict_bytes

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
            head = Head(Kind.VERDICT, known.number, known.length, len(tokens), root)
            with self._alive():
                self.channel.send(head, body)
            known.length += len(tokens)
            self.expected_bytes += verdict_bytes(len(tokens), self.hidden, self.itemsize)

    def propose(self, guesses: Sequence[Guess]) -> list[TokenTree | None]:
        """See :class:`~shoal.serve.decode.protocols.Drafter`."""
        from shoal.serve.decode.dovetail_wire import Head, Kind, draft_bytes

        asked = []
        for guess in guesses:
            known, place = self._of(guess.request), len(guess.request.tokens)
            ready = known.length == place - 1
            asked.append(ready)
            if ready:
                nodes = min(self._nodes, guess.nodes)
                with self._alive():
                    self.channel.send(Head(Kind.ASK, known.number, place, nodes))
        found: list[TokenTree | None] = []
        for guess, ready in zip(guesses, asked, strict=True):
            tree = self._draft(guess.request) if ready else None
            found.append(tree)
            if ready:
                self.expected_bytes += draft_bytes(0 if tree is None else tree.nodes)
        return found

    def _draft(self, request: Request) -> TokenTree | None:
        import numpy as np

        from shoal.serve.decode.dovetail_wire import Kind
        from shoal.serve.decode.protocols import TokenTree, branches

        with self._alive():
            head = self.channel.head()
            if head.kind != Kind.DRAFT or head.b > MAX_NODES:
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
        """See :class:`~shoal.serve.decode.protocols.Drafter`."""
        return self._bytes


def _close(end: Any, process: Any) -> None:
    """Hang up; the drafter leaves by itself, or is ended."""
    import subprocess

    end.close()
    try:
        process.wait(timeout=_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
