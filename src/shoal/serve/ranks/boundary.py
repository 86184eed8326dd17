"""What crosses from one stage of a serving pipeline to the next: hidden states with a ticket.

The sender copies its states into one of two buffers and goes on; the receiver has up to two
receives open before it needs what they bring. Every message begins with the ticket of its step,
and one that has another ticket than awaited is an error: nothing is ever computed with the
states of another step.

A slower link can be emulated: then what was sent is there so many seconds after it was sent.
With ``blocking`` the sender waits until the receiver has taken the message, as pipelines do
whose sends are synchronous; it is what the other is compared with.

Source: Du et al., EnergonAI, 2022, section 4.2.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.core.errors import RankError

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm, Pending

_TAG, _ACK = "activations", "taken"
# Bytes before the states: ticket, tokens, ns when it was sent. A whole cache line, so that
# the states behind them are aligned.
_HEADER = 64
_SLOTS = 2


class RankBoundary:
    """One rank's ends of the pipeline.

    Args:
        pp: the ranks of this pipeline, first stage first.
        width: numbers of a token.
        dtype: of the states.
        blocking: a sender waits for its receiver.
        latency_s: of the link between stages, to emulate.
    """

    def __init__(
        self,
        pp: Comm,
        width: int,
        dtype: torch.dtype,
        *,
        blocking: bool = False,
        latency_s: float = 0.0,
    ) -> None:
        self._pp, self._width, self._dtype = pp, width, dtype
        self._blocking, self._latency_ns = blocking, int(latency_s * 1e9)
        self.first, self.last = pp.rank == 0, pp.rank == pp.world - 1
        self._expected: deque[tuple[int, Tensor, Pending]] = deque()
        self._sent: deque[tuple[Tensor, Pending]] = deque()

    def expect(self, ticket: int, tokens: int) -> None:
        """Open the receive of a step, in the order of tickets; once for each."""
        if self.first or len(self._expected) >= _SLOTS:
            return
        if self._expected and ticket <= self._expected[-1][0]:
            return
        buffer = self._buffer(tokens)
        self._expected.append(
            (ticket, buffer, self._pp.receive(buffer, self._pp.rank - 1, tag=_TAG))
        )

    def take(self, ticket: int, tokens: int) -> Tensor:
        """States [N, D] of a step, of the stage before.

        Raises:
            RankError: the stage before sent another step, or is gone.
        """
        if not self._expected:
            self.expect(ticket, tokens)
        _, buffer, pending = self._expected.popleft()
        pending.wait()
        header = buffer[:_HEADER].view(torch.int64).tolist()
        if header[:2] != [ticket, tokens]:
            raise RankError(
                f"stage {self._pp.rank}: the stage before sent step {header[0]} of {header[1]} "
                f"tokens, and step {ticket} of {tokens} tokens is awaited"
            )
        if self._latency_ns:
            _sleep_until(header[2] + self._latency_ns)
        if self._blocking:
            self._pp.send(buffer[:8].clone(), self._pp.rank - 1, tag=_ACK).wait()
        return buffer[_HEADER:].view(self._dtype).view(tokens, self._width)

    def send(self, ticket: int, x_ND: Tensor) -> None:
        """Send the states of a step to the next stage."""
        while len(self._sent) >= _SLOTS:
            self._sent.popleft()[1].wait()
        buffer = self._buffer(len(x_ND))
        buffer[_HEADER:].view(self._dtype).copy_(x_ND.reshape(-1))
        buffer[:24].view(torch.int64).copy_(torch.tensor([ticket, len(x_ND), time.monotonic_ns()]))
        target = self._pp.rank + 1
        self._sent.append((buffer, self._pp.send(buffer, target, tag=_TAG)))
        if self._blocking:
            taken = torch.empty(8, dtype=torch.uint8)
            self._pp.receive(taken, target, tag=_ACK).wait()

    def _buffer(self, tokens: int) -> Tensor:
        states = tokens * self._width * self._dtype.itemsize
        return torch.zeros(_HEADER + states, dtype=torch.uint8, device=self._pp.device)


def _sleep_until(
    at_ns: int,
    clock: Callable[[], int] = time.monotonic_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    left = at_ns - clock()
    if left > 0:
        sleep(left / 1e9)
