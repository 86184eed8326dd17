"""A closed loop: so many clients, each with its next request as soon as the last one is answered.

Seconds of a token are those of a step with all clients in it, and the share of other clients'
prompts that is computed between two tokens; the first token waits for prompts before it. A
simulation of the scheduler gives the same with more detail; this form has no state, so that
thousands of measured runs can be compared with it.

Source: Agrawal et al., Sarathi-Serve, 2024 (prompts delay tokens); Zhong et al., DistServe, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.arithmetic import mixture_layers
from shoal.cost.kernels.serving_engines import ServingEngine
from shoal.cost.step_cost.accelerated import AcceleratedStepCost

__all__ = ["Clients", "ClosedLoop", "closed_loop"]

# Tokens of prompts that are computed together, where there are so many.
_TOGETHER = 8192


@dataclass(frozen=True)
class Clients:
    """What a closed loop asks for.

    Args:
        number: requests at a time.
        prompt: tokens of a prompt.
        output: tokens of an answer.
    """

    number: float
    prompt: int
    output: int


@dataclass(frozen=True)
class ClosedLoop:
    """Seconds of a closed loop by cause; an engine's constants turn them into latencies.

    Args:
        kernels_s: kernels of a step with all clients.
        wire_s: collectives of that step.
        own: clients of a group of devices that share attention.
        exchanges: layers whose experts several groups share; 0 without such groups.
        prompt_kernels_s: kernels of one of many prompts, over all groups.
        prompt_wire_s: collectives of it.
        alone_s: kernels of a prompt alone.
        waiting: clients for each server of prompts.
        between: prompts between two tokens of a client; 0 where others compute prompts.
    """

    kernels_s: float
    wire_s: float
    own: float
    exchanges: int
    prompt_kernels_s: float
    prompt_wire_s: float
    alone_s: float
    waiting: float
    between: float

    def tpot(self, engine: ServingEngine) -> float:
        """Seconds of a token after the first."""
        step = engine.kernels * self.kernels_s + engine.wire * self.wire_s + engine.step_s
        step += engine.sequence_s * self.own + engine.shared_s * self.exchanges
        return step + engine.prompts * self.between * self._prompt_s(engine)

    def ttft(self, engine: ServingEngine) -> float:
        """Seconds to the first token."""
        alone = engine.first_prompt * engine.kernels * self.alone_s
        queue = engine.queue * self.waiting * self._prompt_s(engine) + engine.queue_s * self.own
        hand_over = 0.0 if self.between else engine.hand_over_s
        return engine.first_s + alone + queue + hand_over

    def _prompt_s(self, engine: ServingEngine) -> float:
        return engine.kernels * self.prompt_kernels_s + engine.wire * self.prompt_wire_s


def closed_loop(
    decode: AcceleratedStepCost,
    clients: Clients,
    prefill: AcceleratedStepCost | None = None,
    *,
    decoders: int = 1,
    prefillers: int = 1,
) -> ClosedLoop:
    """What a closed loop takes, by cause.

    Args:
        decode: steps of the devices that generate; of all devices without ``prefill``.
        clients: what is asked.
        prefill: steps of the devices that compute prompts; None where the same ones do.
        decoders: servers that generate.
        prefillers: servers that compute prompts.
    """
    prompts = prefill or decode
    split = decode.split
    number = clients.number / decoders
    step = decode.unscaled.decode_terms(number, clients.prompt + clients.output / 2)
    groups = prompts.split.replicas
    waiting = clients.number / (prefillers if prefill else 1)
    together = max(1.0, min(_TOGETHER / clients.prompt, waiting / groups))
    many = prompts.unscaled.prompt_terms(together, clients.prompt)
    one = prompts.unscaled.prompt_terms(1.0, clients.prompt)
    return ClosedLoop(
        kernels_s=step.total - step.communication - step.overhead,
        wire_s=step.communication,
        own=max(1.0, number / split.replicas),
        exchanges=mixture_layers(decode.shape) if split.replicas > 1 else 0,
        prompt_kernels_s=(many.total - many.communication) / together / groups,
        prompt_wire_s=many.communication / together / groups,
        alone_s=one.total,
        waiting=waiting,
        between=0.0 if prefill else clients.number / clients.output,
    )
