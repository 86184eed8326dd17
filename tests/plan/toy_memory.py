"""A toy memory in which every slot is checked, as the runner of a toy model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from shoal.ir import Chunk, Step, StepResult, Transfer


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """The toy model: the next token follows from all tokens before it, and from the seed."""
    return hash((seed, *tokens)) % 97


class Memory:
    """A runner with slots that remember what was written; transfers end whenever they like.

    A transfer reads and writes at its end, or at its start, or both, and it may end much
    later. So whoever touches its blocks meanwhile is found out.
    """

    def __init__(self, block_size: int, seed: int) -> None:
        self.size = block_size
        self.cache: dict[int, int] = {}
        self.host: dict[int, int] = {}
        self.draw = random.Random(seed)
        self.moved = 0
        # Transfers under way; whether each has copied once.
        self.flying: dict[int, tuple[Transfer, bool]] = {}

    def execute(self, step: Step) -> StepResult:
        done: set[int] = set()
        for transfer in step.transfers:
            assert transfer.id not in self.flying
            self.flying[transfer.id] = (transfer, False)
        if step.chunks:
            for one in step.wait_for:
                self.end(one, done)
        elif step.wait_for:
            self.end(self.draw.choice(step.wait_for), done)
        for one in list(self.flying):
            if self.draw.random() < 0.2:
                self.begin(one)
            if self.draw.random() < 0.2:
                self.end(one, done)
        for source, target, count in step.moves:
            for offset in range(count * self.size):
                old, new = source * self.size + offset, target * self.size + offset
                self.cache[new] = self.cache.get(old, -1)
        self.moved += len(step.moves)
        tokens = {}
        for chunk in step.chunks:
            self.compute(chunk)
            if chunk.yields:
                tokens[chunk.request.id] = [
                    next_token(chunk.request.tokens, chunk.request.params.seed)
                ]
        return StepResult(tokens, done=frozenset(done))

    def begin(self, one: int) -> None:
        transfer, begun = self.flying[one]
        if begun or any(before in self.flying for before in transfer.after):
            return
        self.copy(transfer)
        self.flying[one] = (transfer, True)

    def end(self, one: int, done: set[int]) -> None:
        if one not in self.flying:
            assert one in done, f"transfer {one} is waited for and was never begun"
            return
        transfer, begun = self.flying[one]
        for before in transfer.after:
            if before in self.flying:
                self.end(before, done)
        if not begun or self.draw.random() < 0.5:
            self.copy(transfer)
        del self.flying[one]
        done.add(one)

    def copy(self, transfer: Transfer) -> None:
        old, new = (self.cache, self.host) if transfer.kind == "out" else (self.host, self.cache)
        for source, target, count in transfer.copies:
            for offset in range(count * self.size):
                new[target * self.size + offset] = old.get(source * self.size + offset, -1)

    def compute(self, chunk: Chunk) -> None:
        request = chunk.request
        for place in range(chunk.stop):
            slot = request.blocks[place // self.size] * self.size + place % self.size
            content = hash((request.adapter, tuple(request.tokens[: place + 1])))
            if place >= chunk.start:
                self.cache[slot] = content
            assert self.cache.get(slot) == content, f"{request.id}: token {place} was overwritten"
