"""Multi-turn conversations: every turn sends the whole history again."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.cost.workloads.drawing import (
    LengthLaw,
    Positive,
    Requests,
    Scale,
    check_sizes,
    times,
    token_ids,
)
from shoal.ir import Arrival


@part
class Multiturn:
    """Conversations: the prompt of a turn is all earlier questions and answers, and a new question.

    The trace is open-loop: a turn arrives one thinking time after the previous turn arrived,
    whether that was answered or not. The history holds the answers of the trace, not those of the
    server, so the server can reuse only the prompts of a conversation. A conversation ends early if
    its next turn would be longer than ``max_position``.

    Args:
        requests: turns of all conversations, unless a command says otherwise.
        rate: turns per second of all conversations; None starts all of them at time 0, and
            their later turns still follow after thinking.
        burstiness: standard deviation of the time between conversations over its mean; 1 is
            a Poisson process, more comes in bursts.
        scale: divisor of all lengths, for small models and machines.
        turns: turns of a conversation.
        think_s: mean time between two turns, s, exponentially distributed.
    """

    requests: Requests = 200
    rate: Positive | None = None
    burstiness: Positive = 1.0
    scale: Scale = 1.0
    turns: Annotated[int, Ge(1), Le(1000)] = 4
    think_s: Annotated[float, Ge(0), Le(1_000_000)] = 10.0

    QUESTIONS: ClassVar = LengthLaw(100, 0.9, 4, 1000)
    ANSWERS: ClassVar = LengthLaw(120, 1.0, 4, 800)

    def arrivals(
        self, *, count: int | None, vocab_size: int, max_position: int, seed: int
    ) -> list[Arrival]:
        check_sizes(count, vocab_size, max_position)
        number = count or self.requests
        arrivals: list[Arrival] = []
        # Every conversation has at least one turn, so there are enough of them.
        rate = None if self.rate is None else self.rate / self.turns
        for session, start in enumerate(times(number, rate, self.burstiness, seed)):
            if rate is None and len(arrivals) >= number:
                break
            arrivals.extend(self._talk(session, start, vocab_size, max_position, seed))
        arrivals.sort(key=lambda arrival: arrival.at)
        return arrivals[:number]

    def _talk(
        self, session: int, start: float, vocab_size: int, max_position: int, seed: int
    ) -> list[Arrival]:
        random = generator(seed, purpose="workload multiturn lengths", index=session)
        history: tuple[int, ...] = ()
        at = start
        turns: list[Arrival] = []
        for turn in range(self.turns):
            question = self.QUESTIONS.draw(random, self.scale)
            answer = self.ANSWERS.draw(random, self.scale)
            pause = float(random.exponential(self.think_s)) if self.think_s else 0.0
            if turn == 0:
                answer = min(answer, max_position // 2)
                question = max(1, min(question, max_position - answer))
            if len(history) + question + answer > max_position:
                break
            said = token_ids(
                question + answer,
                vocab_size,
                seed,
                purpose="multiturn",
                index=session * self.turns + turn,
            )
            turns.append(Arrival(at, history + said[:question], answer, f"s{session}"))
            history += said
            at += pause
        return turns
