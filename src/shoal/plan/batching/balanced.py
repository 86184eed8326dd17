"""Replicas behind a balancer, as the simulator asks: the router's own object chooses.

The router sees the text of a prompt and the requests that each replica has open; here it is the
prompt's tokens, and the same books.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.ir import Arrival

if TYPE_CHECKING:
    from shoal.plan.balance.replicas.protocols import Balancer


class Balanced:
    """A :class:`~shoal.ir.phases.Dispatcher` of replicas that compute both phases.

    Args:
        balancer: chooses.
        replicas: how many there are.
        arrivals: what will come; the id of a request is its place among them.
    """

    def __init__(self, balancer: Balancer, replicas: int, arrivals: Sequence[Arrival]) -> None:
        self._balancer, self._arrivals = balancer, arrivals
        self._loads = dict.fromkeys(range(replicas), 0)
        self._open: dict[str, int] = {}

    def prompt(self, request_id: str, n_tokens: int) -> int:
        result = self._balancer.choose(self._arrivals[int(request_id)].prompt, self._loads)
        self._loads[result] += 1
        self._open[request_id] = result
        return result

    def prompted(self, request_id: str) -> None:
        """It is open until it ends."""

    def decode(self, request_id: str, n_tokens: int) -> int:
        return self._open[request_id]

    def ended(self, request_id: str) -> None:
        self._loads[self._open.pop(request_id)] -= 1
