"""Faults on purpose: what recovery is worth is known when something was killed.

``kill-rank:50`` kills one rank when 50 more steps are done, ``kill-node:50`` all ranks of a node
and their snapshot processes. Who it is follows from the seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.errors import require
from shoal.core.random import generator

if TYPE_CHECKING:
    from shoal.train.supervise import Supervisor

_KINDS = ("kill-rank", "kill-node")


class Chaos:
    """Kills while a run trains.

    Args:
        text: ``KIND:STEPS``, and how many faults there are at most: ``KIND:STEPS:COUNT``.
        ranks_per_node: ranks that are lost with a node.
        seed: of the choice.

    Raises:
        ConfigError: the text says nothing that can be done.
    """

    def __init__(self, text: str, *, ranks_per_node: int = 1, seed: int = 0) -> None:
        kind, _, rest = text.partition(":")
        every, _, count = rest.partition(":")
        require(
            kind in _KINDS and every.isdigit() and int(every) > 0 and (count or "1").isdigit(),
            "--chaos",
            text,
            expected=f"KIND:STEPS or KIND:STEPS:COUNT with a kind of {', '.join(_KINDS)}",
        )
        self.kind = kind
        self.every = int(every)
        self.left = int(count) if count else -1
        self.ranks_per_node = ranks_per_node
        self.killed: list[tuple[int, tuple[int, ...]]] = []
        """(step, ranks) of what was done."""
        self._seed = seed
        self._next = self.every

    def __call__(self, supervisor: Supervisor, event: dict[str, Any]) -> None:
        """Called with every event of the run."""
        if event["kind"] != "step" or event["step"] + 1 < self._next or not self.left:
            return
        self.left -= 1
        self._next = event["step"] + 1 + self.every
        source = generator(self._seed, purpose="chaos", index=len(self.killed))
        size = 1 if self.kind == "kill-rank" else self.ranks_per_node
        first = int(source.integers(supervisor.ranks // size)) * size
        ranks = tuple(range(first, first + size))
        self.killed.append((event["step"], ranks))
        if self.kind == "kill-rank":
            supervisor.processes[first].kill()
        else:
            supervisor.lose(ranks)
