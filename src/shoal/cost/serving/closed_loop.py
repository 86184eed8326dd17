"""A closed loop: so many clients, each with its next request as soon as the last one is answered.

Seconds of a token are those of a step with all clients in it, and the share of other clients'
prompts that is computed between two tokens; the first token waits for prompts before it. All
clients begin at once, so that each waits for half of the others' prompts in its first round; later
rounds are apart by what that wait was, unless the engine computes all prompts before any token. A
simulation of the scheduler gives the same with more detail; this form has no state, so that
thousands of measured runs can be compared with it.

Source: Agrawal et al., Sarathi-Serve, 2024 (prompts delay tokens); Zhong et al., DistServe, 2024;
InferenceX, benchmark_serving.py, 2026 (all requests at once, ten for each client).
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
    """The workload of a closed loop.

    Args:
        number: of clients, which all begin at once.
        prompt: tokens of the longest prompt.
        output: tokens of the longest answer.
        spread: lengths are drawn evenly from ``1 - spread`` of the longest to all of it.
        rounds: requests of each client.
    """

    number: float
    prompt: int
    output: int
    spread: float = 0.0
    rounds: int = 10


@dataclass(frozen=True)
class ClosedLoop:
    """Seconds of a closed loop by cause; an engine's constants turn them into latencies.

    Args:
        kernels_s: kernels of a step with all clients that are answered at a time.
        wire_s: collectives of that step.
        own: of these, clients of a group of devices that share attention.
        shared: several groups share the experts of a server that computes prompts too; 1 or 0.
        prompt_kernels_s: kernels of one of many prompts, over all groups.
        prompt_wire_s: collectives of it.
        alone_s: kernels of a prompt alone.
        waiting: clients for each server of prompts.
        between: prompts between two tokens of a client; 0 where others compute prompts.
        apart: others compute prompts; 1 or 0.
        aligned: share of the rounds in which all clients' prompts come at once.
        together: prompts of a step, where so many wait.
        mixed: prompts and tokens share a step; 1 or 0.
        layers: of the model, whose kernels are launched one by one in a step with prompts.
        queued: prompts that wait at any time because servers of prompts are fewer than needed.
        full: steps that a request waits until the cache of those before it is free.
    """

    kernels_s: float
    wire_s: float
    own: float
    shared: float
    prompt_kernels_s: float
    prompt_wire_s: float
    alone_s: float
    waiting: float
    between: float
    apart: float
    aligned: float
    together: float
    mixed: float
    layers: float
    queued: float
    full: float

    def tpot(self, engine: ServingEngine) -> float:
        """Seconds of a token after the first."""
        step = engine.kernels * self.kernels_s + engine.wire * self.wire_s + engine.step_s
        step += engine.sequence_s * self.own
        # Of prompts that come at once, half are computed before a client's own answer begins.
        between = self.between * (1.0 - self.aligned / 2.0)
        prompt = self._prompt_s(engine)
        # A step with prompts takes as long as its launches, whatever else is in it.
        many = _larger(1.0, between)
        launches = self.layers * engine.eager_s - self.mixed * step - many * prompt
        return step + between * (prompt + _larger(0.0, launches) / many)

    def ttft(self, engine: ServingEngine) -> float:
        """Seconds to the first token."""
        launches = self.layers * engine.eager_s
        alone = _larger(engine.first_prompt * engine.kernels * self.alone_s, launches)
        prompt = _larger(self._prompt_s(engine), launches / self.together)
        queue = (self.aligned * self.waiting / 2.0 + self.queued) * prompt
        queue += engine.queue_s * self.own + engine.hand_over_s * self.apart
        steps = engine.first_steps + engine.balance_steps * self.shared + self.full
        return alone + queue + steps * self.tpot(engine)

    def _prompt_s(self, engine: ServingEngine) -> float:
        return engine.kernels * self.prompt_kernels_s + engine.wire * self.prompt_wire_s


def _larger(one: float, other: float) -> float:
    """The larger of two numbers, or of each pair of two arrays."""
    return (one + other + abs(one - other)) / 2.0


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
    prompts, mean = prefill or decode, 1.0 - clients.spread / 2.0
    prompt, output = max(1, round(mean * clients.prompt)), mean * clients.output
    number, full = clients.number / decoders, 0.0
    fit = decode.most_requests(prompt, output)
    # Where the weights alone are more than this budget of memory, the run shows that they fitted.
    if 1.0 < fit < number:
        full = (number / fit - 1.0) * (1.0 - 0.5 / clients.rounds) * output
        number = fit
    waiting = clients.number / (prefillers if prefill else 1)
    groups = prompts.split.replicas
    together = max(1.0, min(_TOGETHER / prompt, waiting / groups))
    many = prompts.unscaled.prompt_terms(together, prompt)
    alone = prompts.unscaled.prompt_terms(1.0, prompt)
    each = many.total / together / groups
    step = decode.unscaled.decode_terms(number, prompt + output / 2)
    between = queued = 0.0
    if prefill is None:
        between = max(0.0, number - 1.0) / output
    else:
        # The slower of both kinds of servers sets how many clients the other has at a time.
        most = number
        for _ in range(12):
            answer = output * step.total
            busy = most * answer / max(answer + alone.total, waiting * each)
            if abs(busy / number - 1.0) < 0.02:
                break
            number = math.sqrt(number * busy)
            step = decode.unscaled.decode_terms(number, prompt + output / 2)
        queued = max(0.0, waiting - (output * step.total + alone.total) / each)
    mixed = decode.engine.mixed or prefill is not None
    answer = output * (step.total + between * each)
    exchanged = decode.split.replicas > 1 and mixture_layers(decode.shape) > 0
    return ClosedLoop(
        kernels_s=step.total - step.communication - step.overhead,
        wire_s=step.communication,
        own=max(1.0, number / decode.split.replicas),
        shared=float(exchanged and prefill is None),
        prompt_kernels_s=(many.total - many.communication) / together / groups,
        prompt_wire_s=many.communication / together / groups,
        alone_s=alone.total,
        waiting=waiting,
        between=between,
        apart=float(prefill is not None),
        aligned=_aligned(clients, answer, waiting * each, mixed),
        together=together,
        mixed=float(mixed),
        layers=float(decode.shape.num_layers) * (prompt > decode.engine.recorded),
        queued=queued,
        full=full,
    )


def _aligned(clients: Clients, answer_s: float, prompts_s: float, mixed: bool) -> float:
    """Share of the rounds in which the prompts of all clients come at once.

    In the first one all do. Where prompts have steps of their own, answers begin together then, and
    end as far apart as their lengths are: after several rounds as the sum of so many draws.

    Args:
        clients: their lengths and rounds.
        answer_s: seconds of an answer.
        prompts_s: seconds of all clients' prompts.
        mixed: prompts and tokens share a step, so that answers begin one after the other.
    """
    shares = 1.0
    for done in range(1, 1 if mixed else clients.rounds):
        apart = clients.spread * answer_s * math.sqrt(done)
        shares += max(0.0, 1.0 - apart / prompts_s)
    return shares / clients.rounds


def prompt_s(cost: StepCost, engine: ServingEngine, tokens: int, before: int = 0) -> float:
    """Seconds of a prompt alone behind tokens in the cache, in the steps that the engine takes."""
    ends = range(0, tokens, engine.chunk)
    return sum(cost.seconds([(before + at, min(engine.chunk, tokens - at))]) for at in ends)


def token_s(cost: AcceleratedStepCost, clients: Clients) -> float:
    """Seconds between two tokens of each request while as many come as go.

    A step has a token of every request and, where the engine mixes, as much of others' prompts as
    comes in that time; otherwise prompts take steps of their own, those that come at once together.
    """
    # Requests that began together end together: their prompts fill steps, which hide launches.
    cost, prompt, number = cost.hidden, clients.prompt, max(1, round(clients.number))
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
