"""A process of nodes: each has threads that compute, exchange and listen, over TCP.

An exchange takes four messages, so that both ends count it or neither: ``offer`` with a vector;
``accept`` with the other's, or ``refuse`` of one that is busy; ``commit``; ``done``. Until it has
read ``commit`` the one end, and until it has read ``done`` the other, nothing is changed, so a node
that dies between leaves its neighbour as it was.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core.parts import table
from shoal.fields.federate.costs import settings_of
from shoal.fields.federate.gossip.job import GossipJob
from shoal.fields.federate.gossip.local import LearnedWork
from shoal.fields.federate.gossip.planning import setting_of, start_seed
from shoal.fields.federate.gossip.protocols import GossipNode, Push, Spot
from shoal.fields.federate.gossip.wire import NodeLine, checked
from shoal.fields.federate.protocols import FederationError, UpdateRefusedError

# Seconds after which a message of an exchange, or a push, is given up.
TIMEOUT_S = 5.0
# Exchanges in a row that find no one at the other end, after which the neighbour counts as gone.
_TRIES = 3
# How often, and after which seconds, a neighbour that has closed its line is looked for.
_ASKED, _ASKED_S = 10, 0.2
# Seconds for which a node waits for the end of an exchange that another has begun with it.
_BUSY_S = 0.1


@dataclass
class NodeRunner:
    """A node between its sockets and its clocks.

    Args:
        me: its number.
        node: at work.
        key: of the run.
        most: bytes of the tensors of its largest message.
        bytes_per_s: of its link; 0 for no limit.
        timeout_s: of a message.

    Attributes:
        ports: node -> port, of all nodes; set before :meth:`start`.
        begun: ``time.monotonic()`` of the run's beginning, the same for all processes.
        refused: exchanges that a busy neighbour refused; failed: that ended between.
        messages: that carried tensors to a neighbour.
    """

    me: int
    node: GossipNode
    key: str
    most: int
    bytes_per_s: float = 0.0
    timeout_s: float = TIMEOUT_S
    ports: dict[int, int] = field(default_factory=dict)
    begun: float = 0.0
    refused: int = 0
    failed: int = 0
    messages: int = 0

    def __post_init__(self) -> None:
        self.over = threading.Event()
        # Held for the moment in which the node changes.
        self._state = threading.Condition()
        # Held during an exchange.
        self._busy = threading.Lock()
        self._lines: dict[int, NodeLine] = {}
        self._tries: dict[int, int] = {}
        self._sent = 0
        self._reported = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._served: set[NodeLine] = set()

    @property
    def port(self) -> int:
        """On which it listens."""
        return int(self._listener.getsockname()[1])

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.begun

    def listen(self) -> None:
        """Answer who connects."""
        self._thread(self._accept)

    def start(self) -> None:
        """Begin to work, at the time that is the beginning."""
        for work in (self._compute, self._exchange_on):
            self._thread(work)

    def stop(self) -> None:
        """End all threads; those that wait on a socket end with the process."""
        self.over.set()
        with self._state:
            self._state.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for line in (*tuple(self._lines.values()), *tuple(self._served)):
            line.close()

    def _thread(self, work: Any, *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    # Work

    def _compute(self) -> None:
        self.over.wait(max(0.0, -self.now))
        while not self.over.is_set():
            with self._state:
                now = self.now
                due = self.node.due(now)
                if due is None or due > now:
                    self._state.wait(0.5 if due is None else min(due - now, 0.5))
                    continue
                model = self.node.begin(self.now)
            result = self.node.compute(model)
            with self._state:
                pushes = self.node.finish(result, self.now)
            for push in pushes:
                self._push(push)

    def _push(self, push: Push) -> None:
        try:
            line = self._line(push.to)
            if self.bytes_per_s:
                time.sleep(sum(one.nbytes for one in push.tensors.values()) / self.bytes_per_s)
            before = line.sent
            line.send("push", {"round": push.round}, push.tensors)
        except OSError:
            self._lost(push.to)
            return
        self._count(line.sent - before)

    def _exchange_on(self) -> None:
        self.over.wait(max(0.0, -self.now))
        while not self.over.is_set():
            with self._state:
                now = self.now
                due = self.node.exchange_due(now)
                if due is None or due[0] > now:
                    self._state.wait(0.5 if due is None else min(due[0] - now, 0.5))
                    continue
            self._exchange(due[1])

    def _exchange(self, peer: int) -> bool:
        """Exchange messages with a neighbour; false if it did not come to that."""
        if not self._busy.acquire(timeout=_BUSY_S):
            return False
        settled = False
        try:
            line = self._line(peer)
            with self._state:
                mine = self.node.offer(peer, self.now)
            before = line.sent
            line.send("offer", {}, mine)
            kind, _, theirs = line.receive(self.timeout_s)
            self._tries[peer] = 0
            if kind == "refuse":
                self.refused += 1
                return False
            checked(kind, "accept")
            line.send("commit", {})
            checked(line.receive(self.timeout_s)[0], "done")
            with self._state:
                self.node.settle(peer, mine, theirs, self.now)
                settled = True
                self._state.notify_all()
            self._count(line.sent - before)
            return True
        except (OSError, FederationError):
            self.failed += 1
            self._lost(peer)
            return False
        finally:
            self._end(peer, settled)

    def _end(self, peer: int, settled: bool) -> None:
        """An exchange has ended, in one way or the other."""
        if not settled:
            with self._state:
                self.node.postpone(peer, self.now)
                self._state.notify_all()
        self._busy.release()

    def _line(self, peer: int) -> NodeLine:
        """To a neighbour: the compute thread pushes or the other one exchanges, never both."""
        if peer not in self._lines:
            port = self.ports[peer]
            self._lines[peer] = NodeLine.to(port, self.most, self.me, self.key, self.timeout_s)
        return self._lines[peer]

    def _lost(self, peer: int) -> None:
        """The line to a neighbour is broken: another is tried, a few times."""
        if line := self._lines.pop(peer, None):
            line.close()
        self._tries[peer] = self._tries.get(peer, 0) + 1
        if self._tries[peer] >= _TRIES and not self.over.is_set():
            with self._state:
                self.node.gone(peer, self.now)

    def _count(self, sent: int) -> None:
        with self._state:
            self._sent += sent
            self.messages += 1

    # Listening

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed at the end
            while True:
                connection, _ = self._listener.accept()
                line = NodeLine(connection, self.most)
                self._served.add(line)
                self._thread(self._serve, line)

    def _serve(self, line: NodeLine) -> None:
        """One connection, to its end."""
        peer: int | None = None
        try:
            kind, words, _ = line.receive(self.timeout_s)
            checked(kind, "hello")
            known = hmac.compare_digest(str(words.get("key", "")).encode(), self.key.encode())
            if not known or not isinstance(words.get("from"), int):
                return
            peer = words["from"]
            while True:
                kind, words, tensors = line.receive()
                if kind == "push":
                    self._take(peer, Push(to=self.me, tensors=tensors, round=int(words["round"])))
                elif kind == "offer":
                    self._answer(line, peer, tensors)
                elif kind == "look":
                    line.send("state", *self._look())
                elif kind == "stop":
                    self.stop()
        except (OSError, FederationError, KeyError, ValueError, TypeError):
            pass
        finally:
            line.close()
            self._served.discard(line)
        if peer in self.ports and not self.over.is_set():
            self._gone_if_unreachable(peer)

    def _gone_if_unreachable(self, peer: int) -> None:
        """A neighbour closed its line: it is gone if no one listens where it was.

        A process that ends closes its sockets one after the other, so it is asked more than once.
        """
        for _ in range(_ASKED):
            try:
                socket.create_connection(("127.0.0.1", self.ports[peer]), 1.0).close()
            except OSError:
                with self._state:
                    self.node.gone(peer, self.now)
                    self._state.notify_all()
                return
            if self.over.wait(_ASKED_S):
                return

    def _take(self, peer: int, push: Push) -> None:
        with self._state:
            self.node.receive(peer, push, self.now)
            self._state.notify_all()

    def _answer(self, line: NodeLine, peer: int, theirs: Mapping[str, np.ndarray]) -> None:
        """The other end of an exchange."""
        if not self._busy.acquire(blocking=False):
            line.send("refuse", {})
            return
        settled = False
        try:
            with self._state:
                mine = self.node.offer(peer, self.now)
            before = line.sent
            line.send("accept", {}, mine)
            checked(line.receive(self.timeout_s)[0], "commit")
            with self._state:
                try:
                    self.node.settle(peer, mine, theirs, self.now)
                except UpdateRefusedError:
                    line.send("refuse", {})
                    return
                settled = True
                self._state.notify_all()
            line.send("done", {})
            self._count(line.sent - before)
        finally:
            self._end(peer, settled)

    def _look(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The state of the run for the process that started it; each note is in one of them."""
        with self._state:
            now = self.now
            notes, self._reported = self.node.notes[self._reported :], len(self.node.notes)
            words = {
                "progress": self.node.progress(now),
                "now": now,
                "count": self.node.count,
                "messages": self.messages,
                "sent": self._sent,
                "refused": self.refused,
                "failed": self.failed,
            }
            model = np.ascontiguousarray(self.node.model(now))
        # The words of a message have a limited size; notes may have any.
        packed = np.frombuffer(json.dumps(notes).encode() or b" ", np.uint8)
        return words, {"model": model, "notes": packed}


def main() -> None:
    """Read what to do from standard input; print the ports; begin at the time that is read next."""
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    job = GossipJob.model_validate(given["job"])
    setting = setting_of(job)
    learner = table("learner").build(job.learner, where="learner")
    learning = learner.build(setting.train.x.shape[1:], setting.train.classes)
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)
    alone, runners = threading.Lock(), []
    for me in given["nodes"]:
        work = LearnedWork(
            learner,
            learning,
            setting.train.rows(setting.rows[me]),
            settings_of(job.as_federate()),
            job.steps,
            (me, setting.graph.nodes),
            alone,
        )
        spot = Spot(
            me=me, graph=setting.graph, seed=job.seed, start=start_seed(job, me),
            rounds=job.rounds, unit_s=given["unit_s"], shared=given["shared"],
        )  # fmt: skip
        most = 8 * work.size + 64
        node = setting.policy.node(spot, work)
        rate = setting.specs[me].bytes_per_s
        runners.append(NodeRunner(me, node, given["key"], most, bytes_per_s=rate))
    for runner in runners:
        runner.listen()
    print(json.dumps({runner.me: runner.port for runner in runners}), flush=True)
    begin: dict[str, Any] = json.loads(sys.stdin.readline())
    for runner in runners:
        runner.ports = {int(node): port for node, port in begin["ports"].items()}
        runner.begun = begin["begun"]
        runner.start()
    for runner in runners:
        runner.over.wait()


if __name__ == "__main__":
    main()
