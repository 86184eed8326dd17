"""Requests of a masked-diffusion model: blocks of masks, each worked on until none is left.

A request is its prompt and ``max_tokens`` masks. A step works on one block of every running
request; the runner says when a block is text, and then its tokens are the request's. Requests
join when the cache holds them at full length, for every token sees all others, so nothing is
preempted and nothing of a cache is shared. First come, first served.

Source: Nie et al., Large Language Diffusion Models (LLaDA), 2025, section 2.4 (blocks from left to
right); Ma et al., dInfer, 2025.
"""

from __future__ import annotations

from shoal.core.errors import ServeError, require
from shoal.ir import (
    Chunk,
    KVManager,
    Output,
    Request,
    SamplingParams,
    SchedulerLimits,
    Step,
    StepResult,
)
from shoal.ir.serving import FinishReason
from shoal.plan.batching.common import Queues


def full_length(request: Request, max_position: int) -> int:
    """Tokens and masks of a request together."""
    return min(request.n_prompt + request.params.max_tokens, max_position)


def block_of(request: Request, block: int, max_position: int) -> tuple[int, int]:
    """The block that a request works on: its first place, and the one behind its last.

    Blocks are counted from the end of the prompt; the last one is shorter where they do not fill
    the request.
    """
    start = len(request.tokens)
    return start, min(start + block, full_length(request, max_position))


class MaskedScheduler(Queues):
    """The scheduler of :class:`~shoal.serve.decode.diffusion.part.Diffusion`.

    Args:
        limits: what to keep to; steps are never cut, so ``max_step_tokens`` is not one of them.
        block: masks of a block.
        mask_id: the mask token, which no prompt has.
    """

    def __init__(self, kv: KVManager, limits: SchedulerLimits, *, block: int, mask_id: int) -> None:
        super().__init__(kv, limits)
        self.block, self.mask_id = block, mask_id

    def add(self, request: Request) -> None:
        where = f"request {request.id}"
        require(
            self.mask_id not in request.tokens,
            f"{where}: prompt token",
            self.mask_id,
            expected="any but the mask token of the model, which is what it fills in",
            error=ServeError,
        )
        plain = SamplingParams(max_tokens=1)
        for name in (
            "top_k", "top_p", "min_p", "logprobs", "prompt_logprobs", "repetition_penalty",
            "frequency_penalty", "presence_penalty", "logit_bias", "min_tokens", "grammar",
            "pooling",
        ):  # fmt: skip
            value = getattr(request.params, name)
            require(
                value == getattr(plain, name),
                f"{where}: {name}",
                value,
                expected=f"{getattr(plain, name)!r} of a model that is decoded by diffusion, which "
                "fills places in any order",
                hint="temperature, seed, stop and max_tokens can be given",
                error=ServeError,
            )
        super().add(request)

    def plan(self, now: float) -> Step:
        while self.waiting and len(self.running) < self.limits.max_running:
            request = self.waiting[0]
            if not self.kv.allocate(request, full_length(request, self.limits.max_position)):
                self.kv.free(request)
                break
            self._start(request)
        chunks = []
        for request in self.running.values():
            _, end = block_of(request, self.block, self.limits.max_position)
            chunks.append(Chunk(request, request.n_computed, end - request.n_computed))
        return Step(tuple(chunks), at=now)

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        """See :class:`~shoal.ir.engine.Scheduler`; a request without tokens goes on."""
        outputs: list[Output] = []
        for chunk in step.chunks:
            request, params = chunk.request, chunk.request.params
            if self.running.get(request.id) is not request:
                continue  # aborted while the step ran
            before = len(request.tokens)
            request.n_computed = before
            finish: FinishReason | None = None
            for token in result.tokens.get(request.id, ()):
                request.tokens.append(token)
                if token in params.stop_ids:
                    finish = "stop"
                    break
                if len(request.tokens) == full_length(request, self.limits.max_position):
                    finish = "length"
                    break
            new = tuple(request.tokens[before:])
            if new:
                outputs.append(Output(request.id, new, (), finish))
            if finish is not None:
                self._forget(request, keep=False)
        return outputs
