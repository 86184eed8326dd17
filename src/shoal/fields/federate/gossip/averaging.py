"""Averaging: a node trains, sends its model to neighbours, and averages it with theirs.

Source: Boyd et al., Randomized Gossip Algorithms, 2006; with training between the averages: Lian
et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, 2017.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.gossip.graphs import NodeGraph
from shoal.fields.federate.gossip.protocols import Layout, LocalWork, Push, Spot, Tensors
from shoal.fields.federate.protocols import FederationError, UpdateRefusedError


@part
class PlainAverage:
    """The mean of a node's own model and those of its neighbours.

    Args:
        peers: neighbours to whom a model is sent after each round, at random; 0 for all of them,
            whose models of the same round are then waited for.
        buffer: models that are there when they are averaged, where ``peers`` is not 0.
    """

    peers: Annotated[int, Ge(0)] = 0
    buffer: Annotated[int, Ge(1)] = 1

    def share(self, graph: NodeGraph, works: Sequence[LocalWork]) -> dict[str, Any]:
        """Nothing."""
        least = min(map(len, graph.neighbours))
        if self.peers > least:
            raise FederationError(
                f"policy: peers = {self.peers}, and a node has only {least} neighbours; take at "
                "most so many, or 0 for all"
            )
        return {}

    def node(self, spot: Spot, work: LocalWork) -> AveragingNode:
        """A node with a model of its own."""
        return AveragingNode(self, spot, work)

    def message_bytes(self, size: int) -> float:
        """The model in float32."""
        return 4.0 * size

    def work_steps(self, steps: int, batch: int, samples: int) -> float:
        """Those of a round."""
        return float(steps)

    def unit_s(self, graph: NodeGraph, gradient_s: float, exchange_s: float) -> float:
        """Nothing is counted in units."""
        return gradient_s

    def sent(self, tensors: Tensors, draw: np.random.Generator) -> Tensors:
        """What a message has of the sender's tensors."""
        return tensors

    def average(self, stack: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The mean of one tensor of several models.

        Args:
            stack: [k, ...], the node's own first.
            weights: float64 [k], of sum 1.
        """
        return np.tensordot(weights.astype(stack.dtype), stack, axes=1)


def merged(
    policy: PlainAverage, models: Sequence[Tensors], weights: Sequence[float] | None = None
) -> dict[str, np.ndarray]:
    """Average models, tensor by tensor; of a tensor that some do not have, those that do.

    Args:
        policy: averages one tensor.
        models: each a mapping of names to tensors; the first has all of them.
        weights: of the models, of sum 1; equal ones if not given.

    Raises:
        FederationError: tensors differ in shape, or weights do not have the sum 1.
    """
    shares = np.full(len(models), 1 / len(models)) if weights is None else np.array(weights, float)
    if len(shares) != len(models) or (shares < 0).any() or abs(shares.sum() - 1) > 1e-6:
        raise FederationError(
            f"average: weights {shares.tolist()} of {len(models)} models; they must be one each, "
            "not negative, with the sum 1"
        )
    result = {}
    for name, own in models[0].items():
        held = [at for at, model in enumerate(models) if name in model]
        for at in held:
            if models[at][name].shape != own.shape:
                raise FederationError(
                    f"average: tensor {name} of model {at} is {list(models[at][name].shape)}, that "
                    f"of model 0 {list(own.shape)}; only models of one architecture are averaged"
                )
        part_of = shares[held]
        stack = np.stack([models[at][name] for at in held])
        result[name] = policy.average(stack, part_of / part_of.sum())
    return result


def spread(stack: np.ndarray, average: np.ndarray) -> dict[str, float]:
    """What averaging does to the variance of one tensor.

    Args:
        stack: [k, ...], the tensor in each of k > 1 models.
        average: what became of it, [...].

    Returns:
        ``own``: mean variance of the models; ``plain``: that of their mean; ``merged``: that of
        ``average``; ``correlation``: mean of the correlations of pairs, from the first two.
    """
    k, wide = len(stack), stack.astype(np.float64).reshape(len(stack), -1)
    own, plain = float(wide.var(axis=1).mean()), float(wide.mean(axis=0).var())
    correlation = (k * plain / own - 1) / (k - 1) if own > 0 else 1.0
    after = float(average.astype(np.float64).var())
    return {"own": own, "plain": plain, "merged": after, "correlation": correlation}


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix or a kernel, whose variance matters: no bias, norm or scalar."""
    return len(shape) >= 2 and math.prod(shape) >= 2


class AveragingNode:
    """A model, and the models of neighbours that wait to be averaged with it.

    Attributes:
        count: rounds of training.
        notes: of each average its tensors' variances; messages that were dropped.
    """

    def __init__(self, part: PlainAverage, spot: Spot, work: LocalWork) -> None:
        self._part, self._spot, self._work = part, spot, work
        self._layout: Layout = work.layout
        self._sizes = [math.prod(shape) for _, shape in self._layout]
        self._model = work.start(spot.start)
        self.count, self.notes = 0, list[dict[str, Any]]()
        self.losses: list[float] = []
        self._merges = 0
        self._peers = list(spot.peers)
        # Of each round the models that have come; of a policy that does not wait, all in round 0.
        self._come: dict[int, dict[int, Tensors]] = {}
        self._due: float | None = spot.work_s

    def due(self, now: float) -> float | None:
        """When its training ends; None while it waits for its neighbours, and at the end."""
        return self._due

    def begin(self, now: float) -> np.ndarray:
        """Its model."""
        return self._model

    def compute(self, model: np.ndarray) -> tuple[np.ndarray, float]:
        """Local steps."""
        return self._work.train(model, self.count + 1)

    def finish(self, result: tuple[np.ndarray, float], now: float) -> Sequence[Push]:
        """Send the new model, and average it if all is there."""
        self._model, loss = result
        self.count += 1
        self.losses.append(loss)
        tensors = self._split(self._model)
        draw = generator(self._spot.seed, purpose="gossip", step=self.count, index=self._spot.me)
        peers = list(self._peers)
        if self._part.peers:
            some = draw.permutation(len(peers))[: self._part.peers]
            peers = [peers[at] for at in sorted(some)]
        # Each neighbour gets a draw of its own.
        pushes = [
            Push(to=peer, tensors=self._part.sent(tensors, draw), round=self.count)
            for peer in peers
        ]
        self._due = None
        self._go_on(now)
        return pushes

    def receive(self, sender: int, message: Push, now: float) -> None:
        """Keep a neighbour's model; one that cannot be used counts as none, and is noted."""
        if sender not in self._spot.peers:
            raise UpdateRefusedError(f"node {self._spot.me}: {sender} is no neighbour")
        round_ = 0 if self._part.peers else message.round
        there = self._come.setdefault(round_, {})
        there[sender] = self._checked(sender, message.tensors)
        if self._due is None:
            self._go_on(now)

    def _checked(self, sender: int, tensors: Tensors) -> Tensors:
        known = dict(self._layout)
        for name, one in tensors.items():
            why = ""
            if name not in known or one.shape != known[name]:
                why = f"tensor {name} {list(one.shape)} is none of this architecture"
            elif not np.isfinite(one.sum(dtype=np.float64)):
                why = f"tensor {name} has numbers that are not finite"
            if why:
                self.notes.append({"round": self.count, "dropped": sender, "why": why})
                return {}
        return tensors

    def _go_on(self, now: float) -> None:
        """Average if what is waited for is there, and train again."""
        if self._part.peers:
            there = self._come.pop(0, {})
            if len(there) >= self._part.buffer:
                self._merge(there)
            else:
                self._come[0] = there
        else:
            there = self._come.get(self.count, {})
            if any(peer not in there for peer in self._peers):
                return
            self._merge(self._come.pop(self.count, {}))
        self._merges = self.count
        self._due = now + self._spot.work_s if self.count < self._spot.rounds else None

    def _merge(self, there: Mapping[int, Tensors]) -> None:
        own = self._split(self._model)
        models = [own, *(there[peer] for peer in sorted(there) if there[peer])]
        new = merged(self._part, models)
        layers = {
            name: spread(np.stack([one[name] for one in models if name in one]), new[name])
            for name, shape in self._layout
            if is_matrix(shape) and sum(name in one for one in models) > 1
        }
        self.notes.append({"round": self.count, "models": len(models), "layers": layers})
        self._model = np.concatenate([new[name].reshape(-1) for name, _ in self._layout])

    def _split(self, model: np.ndarray) -> dict[str, np.ndarray]:
        parts = np.split(model, np.cumsum(self._sizes)[:-1])
        return {
            name: one.reshape(shape) for (name, shape), one in zip(self._layout, parts, strict=True)
        }

    def gone(self, peer: int, now: float) -> None:
        """It is not waited for any more."""
        if peer in self._peers:
            self._peers.remove(peer)
            self.notes.append({"round": self.count, "gone": peer})
            if self._due is None and self.count > self._merges:
                self._go_on(now)

    def exchange_due(self, now: float) -> None:
        """Models are pushed, not exchanged."""
        return

    def postpone(self, peer: int, now: float) -> None:
        """There is nothing to postpone."""

    def offer(self, peer: int, now: float) -> Tensors:
        """Models are pushed, not exchanged."""
        raise UpdateRefusedError(f"node {peer} asked for an exchange; models are pushed here")

    def settle(self, peer: int, mine: Tensors, theirs: Tensors, now: float) -> None:
        """Models are pushed, not exchanged."""
        raise UpdateRefusedError(f"node {peer} asked for an exchange; models are pushed here")

    def progress(self, now: float) -> float:
        """Rounds whose average is made."""
        return float(self._merges)

    def model(self, now: float) -> np.ndarray:
        """Its model."""
        return self._model
