"""A closed loop: so many clients, each with its next request as soon as the last one is answered.

Seconds of a token are those of a step with all clients in it, and the share of other clients'
prompts that is computed between two tokens; the first token waits for prompts before it. A
simulation of the scheduler gives the same with more detail; this form has no state, so that
thousands of measured runs can be compared with it.

Source: Agrawal et al., Sarathi-Serve, 2024 (prompts delay tokens); Zhong et al., DistServe, 2024.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shoal.cost.arithmetic import mixture_layers
from shoal.cost.kernels.serving_engines import ServingEngine
from shoal.cost.step_cost.accelerated import AcceleratedStepCost
from shoal.ir import StepCost

# Tokens of prompts that are computed together, where there are so many.
_TOGETHER = 8192


@dataclass(frozen=True)
class Clients:
    """The workload of a closed loop."""

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
        hand_over = engine.hand_over_s * (self.between == 0)
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
        clients: workload of the clients.
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


def prompt_s(cost: StepCost, engine: ServingEngine, tokens: int, before: int = 0) -> float:
    """Seconds of a prompt alone behind tokens in the cache, in the steps that the engine takes."""
    ends = range(0, tokens, engine.chunk)
    return sum(cost.seconds([(before + at, min(engine.chunk, tokens - at))]) for at in ends)


def token_s(cost: AcceleratedStepCost, clients: Clients) -> float:
    """Seconds between two tokens of each request while as many come as go.

    A step has a token of every request and, where the engine mixes, as much of others' prompts as
    comes in that time; otherwise prompts take steps of their own, those that come at once together.
    """
    prompt, number = clients.prompt, max(1, round(clients.number))
    decodes = [(round(prompt + clients.output / 2), 1)] * number
    arriving = number / clients.output
    if not cost.engine.mixed:
        together = max(1, min(round(arriving), cost.engine.chunk // prompt))
        alone = cost.seconds([(0, prompt)] * together) / together
        return cost.seconds(decodes) + arriving * alone
    whole = int(arriving)
    rest = round((arriving - whole) * prompt)
    chunks = [(0, prompt)] * whole + [((prompt - rest) // 2, rest)] * (rest > 1)
    return cost.seconds(decodes + chunks)


def drained_s(cost: AcceleratedStepCost, clients: Clients, requests: float = math.inf) -> float:
    """Seconds for each of ``requests`` that all wait from the start, in waves of ``clients``.

    Args:
        cost: of a step.
        clients: at a time.
        requests: in all; without end if not given.
    """
    if not math.isfinite(requests):
        return clients.output * token_s(cost, clients) / clients.number
    number = min(clients.number, requests)
    waves, rest = divmod(requests, number)
    seconds = waves * token_s(cost, replace(clients, number=number))
    if rest >= 1:
        seconds += token_s(cost, replace(clients, number=rest))
    return clients.output * seconds / requests


def arriving(
    cost: AcceleratedStepCost, clients: Clients, rate: float, requests: int
) -> tuple[float, float, float]:
    """Mean seconds to the first token, of a token, and of an answer of requests that come evenly.

    Args:
        cost: of a step.
        clients: the most at a time; those at work are as many as come while one is answered.
        rate: requests a second.
        requests: in all, first come, first served.
    """
    number = clients.number
    for _ in range(30):
        tpot = token_s(cost, replace(clients, number=number))
        number = min(clients.number, (number + rate * clients.output * tpot) / 2)
    answer, slots, begins = clients.output * tpot, max(1, int(clients.number)), list[float]()
    for index in range(requests):
        free = begins[index - slots] + answer if index >= slots else 0.0
        begins.append(max(index / rate, free))
    waited = sum(begin - index / rate for index, begin in enumerate(begins)) / requests
    first = waited + prompt_s(cost, cost.engine, clients.prompt) + tpot
    return first, tpot, first + answer
