"""What an engine has planned, computed and given, as numbers; and when requests began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from shoal.ir import Output, Step
from shoal.serve.engine.hooks import EngineHook, ExecutedStep


class CountersHook(EngineHook):
    """Counts steps, seconds, tokens and preemptions, and says when requests begin."""

    kind: ClassVar[str] = "counters"

    def __init__(self) -> None:
        self._prompt_tokens = self._new_tokens = self._steps = self._preemptions = 0
        self._prompt = 0  # of the step that is committed
        self._seconds = 0.0

    def planned(self, step: Step) -> Step:
        """Count the requests preempted for it."""
        self._preemptions += len(step.preempted)
        return step

    def executed(self, done: ExecutedStep) -> None:
        """Say which requests began, and look at prompts before their chunks are committed."""
        self._prompt = sum(
            max(0, min(chunk.stop, chunk.request.n_prompt) - chunk.start)
            for chunk in done.step.chunks
        )
        new = [chunk.request for chunk in done.step.chunks if chunk.request.began is None]
        if new:
            for request in new:
                request.began = done.started
            self.engine.tell("began", ids=[request.id for request in new], at=done.started)

    def committed(self, done: ExecutedStep, outputs: Sequence[Output]) -> None:
        """Count a step and its tokens."""
        self._steps += 1
        self._seconds += done.now - done.started
        self._prompt_tokens += self._prompt
        # As many as were given: of guesses that hold, those behind the end of an answer are not.
        self._new_tokens += sum(len(output.tokens) for output in outputs)

    def metrics(self) -> Mapping[str, float]:
        """Counters since the start."""
        return {
            "tokens_prompt_total": self._prompt_tokens,
            "tokens_generated_total": self._new_tokens,
            "steps_total": self._steps,
            "step_seconds_total": self._seconds,
            "preemptions_total": self._preemptions,
        }
