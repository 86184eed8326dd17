"""The drafter's process: a feature net with copies of the target's embedding and head.

It receives what is certain, and returns trees. With ``overlap`` it goes on from its own best path
while the target verifies, and throws that away where the target says something else. With
``target_layers`` it computes these first, for every step, and goes on behind them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.ir import ServeJob
from shoal.memory.tiers.mover import EmulatedLink
from shoal.model.drafters import files
from shoal.model.drafters.fusion import FusionDrafter
from shoal.model.parameters import Parameters
from shoal.plan.serving.small_device import tree_room
from shoal.serve.decode.dovetail.net import FusionNet, PlainFusion
from shoal.serve.decode.dovetail.shared_layers import SharedLayers
from shoal.serve.decode.dovetail.steps import unpacked
from shoal.serve.decode.dovetail.taped import fast_net
from shoal.serve.decode.dovetail.trees import FeatureTrees
from shoal.serve.decode.dovetail.wire import SPIN_S, Channel, MessageHeader, MessageKind


def load_trees(settings: dict[str, Any]) -> tuple[FeatureTrees, SharedLayers | None]:
    """The net of a drafter's directory with the embedding and head of its target's, and its layers.

    Raises:
        ShoalError: one of both cannot be read.
    """
    dtype = getattr(torch, settings["dtype"])
    device = torch.device(settings["device"])
    torch.set_default_device(device)  # of masks, places and rotations
    stored = files.read(Path(settings["path"]))
    parameters = Parameters(Path(settings["model"]), dtype)
    config = parameters.config
    net = FusionDrafter(config, int(stored.config.options.get("layers", 1)))
    net.load_state_dict(stored.state)
    net = net.to(device, dtype).requires_grad_(False)
    shape = (config.vocab_size, config.hidden)
    embed = parameters("embed.weight").view(shape).to(device)
    head = embed if config.tied else parameters("output.weight").view(shape).to(device)
    job = ServeJob.model_validate(settings["job"])
    front = None
    if settings["target_layers"]:
        front = SharedLayers(
            parameters, settings["target_layers"], embed, job, ready=settings["ready"]
        )
    depth, breadth, limit = settings["depth"], settings["breadth"], settings["limit"]
    longest = limit + tree_room(depth, breadth)
    ready: FusionNet
    if settings["fast"]:
        ready = fast_net(
            net, embed, head, job, count=breadth, longest=longest, weights=settings["weights"]
        )
    else:
        ready = PlainFusion(net, embed, head, count=breadth, room=longest)
    return FeatureTrees(ready, depth=depth, breadth=breadth, limit=limit), front


class RequestForecast:
    """When the verifier will ask again, by how long it took of late.

    What is begun shortly before makes it wait; what it may wait for at most is half a pass.
    """

    def __init__(self) -> None:
        self._sent: float | None = None
        self._usual_s = 0.0
        self._count = 0

    def sent(self, now: float) -> None:
        """A draft was sent."""
        self._sent = now

    def came(self, now: float) -> None:
        """Something came; what comes first behind a draft is its verdict."""
        if self._sent is not None:
            self._count = min(16, self._count + 1)
            self._usual_s += (now - self._sent - self._usual_s) / self._count
            self._sent = None

    def soon(self, now: float, pass_s: float) -> bool:
        """Whether a pass that begins now would end more than half of itself too late."""
        if self._sent is None or self._count < 4:
            return False
        left = self._sent + self._usual_s - now
        return 0 < left < pass_s / 2


def _serve(
    channel: Channel, trees: FeatureTrees, front: SharedLayers | None, settings: dict[str, Any]
) -> None:
    """Answer until the verifier is gone."""
    dtype, hidden, item = (
        getattr(torch, settings["dtype"]),
        settings["hidden"],
        settings["itemsize"],
    )

    drafted: list[int] = []
    free = True  # what the target needs of this process to verify, it has
    due = RequestForecast()

    def wanted() -> bool:
        return channel.waiting or due.soon(time.perf_counter(), trees.pass_s)

    while True:
        if drafted and free and settings["overlap"] and not channel.waiting:
            trees.on(drafted.pop(), wanted)
            continue
        head = channel.head()
        due.came(time.perf_counter())
        if head.kind == MessageKind.VERDICT:
            tokens = np.frombuffer(channel.body(4 * head.c), dtype=np.uint32).tolist()
            raw = bytearray(channel.body(head.c * hidden * item))
            states = torch.frombuffer(raw, dtype=dtype).view(head.c, hidden)
            trees.certain(head.a, head.b, tokens, states, head.d - 1 if head.d else None)
        elif head.kind == MessageKind.DROP:
            trees.drop(head.a)
        elif head.kind == MessageKind.ASK:
            began, before = time.perf_counter(), trees.passes
            tree = trees.tree(head.a, head.b, head.c)
            if tree is None:
                channel.send(MessageHeader(MessageKind.DRAFT, head.a, 0))
                continue
            body = tree.tokens[1:].astype(np.uint32).tobytes()
            body += np.array(tree.shape.parent[1:], dtype=np.uint8).tobytes()
            took = min(int(1e6 * (time.perf_counter() - began)), 0xFFFFFFFF)
            channel.send(
                MessageHeader(MessageKind.DRAFT, head.a, tree.nodes, trees.passes - before, took),
                body,
            )
            drafted = [head.a]
            free = front is None
            if free:
                due.sent(time.perf_counter())
        elif head.kind == MessageKind.ROOM and front is not None:
            front.room(head.a, head.b, head.c)
        elif head.kind == MessageKind.LAYERS and front is not None:
            step = unpacked(channel.body(head.b), head.c, head.d)
            made = front.states(head.a, step).contiguous().cpu()
            channel.send(
                MessageHeader(MessageKind.STATES, len(made)),
                made.view(torch.uint8).numpy().tobytes(),
            )
            free = True
            due.sent(time.perf_counter())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 when the verifier has left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--settings", required=True)
    given = parser.parse_args(arguments)
    data = json.loads(given.settings)
    if data["cores"]:
        os.sched_setaffinity(0, data["cores"])
    torch.set_num_threads(max(1, len(data["cores"])))
    end = socket.socket(fileno=given.fd)
    link = EmulatedLink(*data["link"]) if data["link"] else None
    channel = Channel(end, link, SPIN_S if data["cores"] else 0.0)
    try:
        trees, front = load_trees(data)
    except ShoalError as cause:
        words = str(cause).encode()
        channel.send(MessageHeader(MessageKind.FAILED, len(words)), words)
        return 1
    nbytes = trees.net.nbytes + (front.nbytes if front is not None else 0)
    channel.send(MessageHeader(MessageKind.READY, nbytes & 0xFFFFFFFF, nbytes >> 32))
    with torch.inference_mode():
        try:
            _serve(channel, trees, front, data)
        except (EOFError, BrokenPipeError):
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
