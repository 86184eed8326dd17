"""Where drafter and target go when one device is small: how deep a drafter, how large a tree.

Verifying on a host costs by the row, so a deeper drafter and a smaller tree pay there. What is
left of the small device's memory takes the first layers of the target. The caller measures or
models the times; nothing here reads a clock.

Source: Zhang et al., Dovetail, 2025, sections 3.1 and 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.core.errors import PlanError, require
from shoal.ir import MAX_NODES, DrafterCalibration, VerificationCost
from shoal.plan.trees.auto import AutoTree


@dataclass(frozen=True, kw_only=True)
class DraftOption:
    """One drafter that could be placed on the small device.

    Args:
        layers: M.
        nbytes: of its weights, the copies of embedding and head, and its cache.
        level_s: s of one level of a tree there.
        right: acceptance rates by level and rank, from its calibration.
        name: distinguishes it from another of as many layers.
    """

    layers: int
    nbytes: int
    level_s: float
    right: tuple[tuple[float, ...], ...]
    name: str = ""

    def __post_init__(self) -> None:
        require(self.layers >= 1, "drafter layers", self.layers, expected="1 or more")
        require(self.level_s > 0, "drafter level_s", self.level_s, expected="above 0 s")
        DrafterCalibration(self.right)


class HeterogeneousPlacement(NamedTuple):
    """One way to place both.

    Args:
        layers: M of the drafter.
        nodes: of a tree.
        target_layers: L, first layers of the target that lie on the small device too.
        tokens: expected of a round.
        draft_s: s of drafting per round.
        link_s: s on the way.
        verify_s: s of the target's step, on both devices.
        link_bytes: on the way in a round, both directions, expected.
        nbytes: on the small device.
        tokens_per_s: expected.
        name: of the drafter.
    """

    layers: int
    nodes: int
    target_layers: int
    tokens: float
    draft_s: float
    link_s: float
    verify_s: float
    link_bytes: float
    nbytes: int
    tokens_per_s: float
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Heterogeneous:
    """A target on a host, and a small device beside it.

    Args:
        verify: s of a step of the target on the host, by its rows.
        hidden: width of the target.
        itemsize: bytes of one of its numbers.
        memory_cap: bytes of the small device.
        link_s: s that a message takes besides its bytes.
        link_bytes_per_s: bandwidth of the link between both, byte/s.
        overlap: the drafter continues from its best path while the target verifies. If this path is
            accepted, drafting adds only the time that verification did not hide.
        round_s: s of a round beside all of these, such as waking up and walking a tree.
        num_layers: of the target.
        layer_bytes: of one of its layers with its cache.
        layer: s of a step of one target layer on the small device, by rows; None keeps all of the
            target on the host.
        head_s: s of a step on the host outside the target's layers.
    """

    verify: VerificationCost
    hidden: int
    itemsize: int
    memory_cap: int
    link_s: float
    link_bytes_per_s: float
    overlap: bool = False
    round_s: float = 0.0
    num_layers: int = 0
    layer_bytes: int = 0
    layer: VerificationCost | None = None
    head_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.link_bytes_per_s > 0, "link_bytes_per_s", self.link_bytes_per_s,
                expected="above 0")  # fmt: skip
        for name in ("link_s", "round_s", "head_s"):
            value = getattr(self, name)
            require(value >= 0, name, value, expected="0 s or more")
        for name in ("num_layers", "layer_bytes"):
            value = getattr(self, name)
            require(value >= 1 or self.layer is None, name, value,
                    expected="1 or more, where layers may lie on the small device")  # fmt: skip

    def rank(
        self, options: Sequence[DraftOption], nodes: Sequence[int] = range(1, 33)
    ) -> list[HeterogeneousPlacement]:
        """Every way that fits, the fastest first.

        Raises:
            PlanError: none of them fits.
        """
        require(bool(options), "drafters", 0, expected="at least one", error=PlanError)
        smallest = min(one.nbytes for one in options)
        if smallest > self.memory_cap:
            raise PlanError(
                f"memory_cap = {self.memory_cap}: the smallest drafter takes {smallest} bytes with "
                "the target's embedding and head; give at least that, or decode without a drafter"
            )
        results = []
        for option in options:
            if option.nbytes > self.memory_cap:
                continue
            most = min(max(nodes), MAX_NODES)
            tree = AutoTree(nodes=most).build(DrafterCalibration(option.right), most)
            expected = tree.expected()
            for count in nodes:
                if count < len(expected):
                    results += self._placed(option, count, tree.first(count).depth, expected[count])
        return sorted(results, key=lambda one: (-one.tokens_per_s, one.nbytes))

    def _placed(
        self, option: DraftOption, nodes: int, depth: int, tokens: float
    ) -> list[HeterogeneousPlacement]:
        """With none and with more and more of the target's layers on the small device."""
        most = 0
        if self.layer is not None:  # the host keeps the last one
            spare = (self.memory_cap - option.nbytes) // self.layer_bytes
            most = min(self.num_layers - 1, spare)
        rows = 1 + nodes
        # A verdict with the accepted tokens' states, a question, and a draft.
        crossed = 60 + 5 * nodes + tokens * (4 + self.hidden * self.itemsize)
        there = 3 * self.link_s + crossed / self.link_bytes_per_s
        # The rows of a step, and what comes out of the layers, once for all of these.
        states = 40 + rows * (13 + self.hidden * self.itemsize)
        boundary = 2 * self.link_s + states / self.link_bytes_per_s
        whole_s = self.verify.seconds(rows)
        head_s = min(self.head_s, whole_s)
        results = []
        for count in range(most + 1):
            host_s, link_s, verify_s, link_bytes = whole_s, there, whole_s, crossed
            if count and self.layer is not None:
                host_s = head_s + (whole_s - head_s) * (1 - count / self.num_layers)
                verify_s = host_s + count * self.layer.seconds(rows)
                link_s += boundary
                link_bytes += states
            # What is drafted ahead begins behind the layers that lie there.
            draft_s = self._draft_s(option, depth, host_s)
            nbytes = option.nbytes + count * self.layer_bytes
            rate = tokens / (draft_s + link_s + verify_s + self.round_s)
            results.append(
                HeterogeneousPlacement(
                    option.layers, nodes, count, tokens, draft_s, link_s, verify_s, link_bytes,
                    nbytes, rate, option.name,
                )
            )  # fmt: skip
        return results

    def _draft_s(self, option: DraftOption, depth: int, verify_s: float) -> float:
        """Expected s for which the target waits for guesses of so many levels."""
        whole = depth * option.level_s
        if not self.overlap:
            return whole
        best = [shares[0] for shares in option.right]
        # The best path to its end and the token behind it; two passes more than a tree takes.
        right = math.prod(best[:depth]) * best[min(depth, len(best) - 1)]
        left = min(whole, max(0.0, whole + 2 * option.level_s - verify_s))
        return right * left + (1 - right) * whole

    def table(
        self, options: Sequence[DraftOption], nodes: Sequence[int] = range(1, 33)
    ) -> list[Mapping[str, float | str]]:
        """The best of every drafter, beside no layers of the target and beside some, best first."""
        best: dict[tuple[str, int, bool], HeterogeneousPlacement] = {}
        for one in self.rank(options, nodes):
            best.setdefault((one.name, one.layers, one.target_layers > 0), one)
        alone = 1 / self.verify.seconds(1)
        return [{**one._asdict(), "speedup": one.tokens_per_s / alone} for one in best.values()]
