"""Serving jobs: what is served, by which parts, and on how many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from shoal.core.config import Kind, Value
from shoal.core.errors import ConfigError
from shoal.core.parts import Choice
from shoal.core.traits import check_beside, traits
from shoal.ir.engine import StepCost
from shoal.ir.job_kind import Job
from shoal.ir.serving import Arrival, SchedulerLimits
from shoal.ir.shape import ModelShape

__all__ = ["Disagg", "Phase", "ServeJob", "ServeParallel", "ServeWork"]


class Phase(Value):
    """The instances of one phase of serving.

    Args:
        count: how many; a plain number stands for this alone.
        tp: devices of an instance that share every layer.
        pp: devices of an instance that share the layers one after the other.
        scheduler: who runs now in an instance; None for that of the phase.
    """

    count: PositiveInt = 1
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    scheduler: Annotated[Choice, Kind("phase")] | None = None

    @model_validator(mode="before")
    @classmethod
    def _number(cls, raw: Any) -> Any:
        return {"count": raw} if isinstance(raw, int | str) else raw

    @property
    def devices(self) -> int:
        """Devices of all instances."""
        return self.count * self.tp * self.pp


class Disagg(Value):
    """Prompts and generation on instances of their own.

    Args:
        prefill: those that compute prompts.
        decode: those that generate.
    """

    prefill: Phase = Phase()
    decode: Phase = Phase()

    @property
    def devices(self) -> int:
        """Devices of both phases."""
        return self.prefill.devices + self.decode.devices


class ServeParallel(Value):
    """How the model of a serving engine is split over ranks.

    Args:
        tp: ranks that share every layer.
        pp: stages, each with layers of its own.
        in_flight: steps that are under way at once; None for as many as there are stages.
    """

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    in_flight: PositiveInt | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp

    @property
    def depth(self) -> int:
        """Steps under way at once."""
        return self.in_flight or self.pp


class ServeJob(Job):
    """Answer requests with a decoder-only language model.

    Args:
        job: the kind of job.
        name: name of the run.
        model: a Hugging Face directory; for planning also a shipped shape.
        precision: dtype of weights and cache; auto takes that of the model's files.
        scheduler: who runs now.
        disagg: instances for prompts and for generation; None computes both in one engine, by
            ``scheduler``.
        parallel: ranks that share the model; one process without.
        kv: who holds which block of the cache.
        kv_tokens: tokens that the cache of an instance holds; None takes what the memory allows,
            up to ``max_running`` requests of full length.
        preempt: what becomes of the cache of a request that has to give its blocks back.
        host_tokens: tokens that host memory holds for that; None takes as many as the cache
            holds, or none with ``preempt = recompute``.
        kv_format: how the cache keeps keys and values.
        weights: format of the matrices of linear layers, such as int4-g128; plain leaves them in
            the precision of the job. A directory that is quantized has its own.
        memory: where the weights of the layers lie.
        kernel: operator -> backend that must compute it; dispatch takes the fastest for others.
        decode: how scores become text: one token after the other; by workers at once; or, of a
            model of masked diffusion, many places at once.
        exact: the numbers of a request have the same bits whatever other requests run beside it.
        speculative: who guesses several tokens a step, which the model verifies; None decodes one
            token a step.
        lossless: refuse an acceptance of guesses that changes what the model would say.
        max_running: most requests in one step.
        max_step_tokens: most tokens in one step; long prompts are cut to fit.
        max_position: most tokens of one request, prompt and output; None for the model's.
        adapters: name that requests call -> adapter directory, loaded with the model.
        max_adapters: adapters that can be in memory; those of ``adapters`` alone if it is 0.
        max_adapter_rank: largest rank of an adapter.
        threads: threads that compute; 0 for all cores but one, which HTTP needs: with every core
            taken, each token sent makes the threads of a step wait for each other. Replicas
            share them.
        replicas: engines of their own behind one address.
        balancer: which of them answers a request.
        launcher: where replicas run: processes of this machine, or actors of a Ray cluster.
        engine: the program that a plan for accelerators is priced for: shoal, vllm, sglang or
            trtllm. Only shoal runs here.
        workload: what arrives, for planning and benchmarks.
        seed: seed of the workload.
    """

    job: Literal["serve"] = "serve"
    name: str = Field(default="serve", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    model: str
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    decode: Annotated[Choice, Kind("decode")] = Choice(name="autoregressive")
    scheduler: Annotated[Choice, Kind("scheduler")] = Choice(name="fcfs")
    disagg: Disagg | None = None
    parallel: ServeParallel = ServeParallel()
    kv: Annotated[Choice, Kind("kv")] = Choice(name="paged")
    kv_tokens: PositiveInt | None = None
    preempt: Annotated[Choice, Kind("preempt")] = Choice(name="recompute")
    host_tokens: NonNegativeInt | None = None
    kv_format: Annotated[Choice, Kind("kv_format")] = Choice(name="plain")
    weights: str = "plain"
    memory: Annotated[Choice, Kind("memory")] = Choice(name="resident")
    kernel: dict[str, str] = {}
    exact: bool = False
    speculative: Annotated[Choice, Kind("speculative")] | None = None
    lossless: bool = False
    max_running: PositiveInt = 64
    max_step_tokens: PositiveInt = 512
    max_position: PositiveInt | None = None
    adapters: dict[str, str] = {}
    max_adapters: NonNegativeInt = 0
    max_adapter_rank: PositiveInt = 64
    threads: NonNegativeInt = 0
    replicas: PositiveInt = 1
    balancer: Annotated[Choice, Kind("balancer")] = Choice(name="prefix_aware")
    launcher: Annotated[Choice, Kind("pool")] = Choice(name="local")
    engine: Literal["shoal", "vllm", "sglang", "trtllm"] = "shoal"
    workload: Annotated[Choice, Kind("workload")] = Choice(name="chat")
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _adaptable(self) -> Self:
        if self.room_for_adapters:
            beside, why = "adapters", "adapters are served by one engine with the whole model"
            self._alone(beside, why)
            check_beside("kv", self.kv, "lends_blocks", has=False, beside=beside, why=why)
            check_beside("memory", self.memory, "weights_stay", has=True, beside=beside, why=why)
        return self

    @model_validator(mode="after")
    def _speculative(self) -> Self:
        if self.speculative is not None:
            beside = f"speculative = {self.speculative.name}"
            why = "guesses are verified by one engine that has the whole model in memory"
            self._alone(beside, why, replicas=True)
            if self.room_for_adapters:
                raise ConfigError(f"adapters with {beside}: guesses know one model; leave one out")
            check_beside("kv", self.kv, "takes_back", has=True, beside=beside, why=why)
            check_beside("memory", self.memory, "weights_stay", has=True, beside=beside, why=why)
            why = "what is guessed changes who is in a step"
            check_beside(
                "scheduler", self.scheduler, "fixed_batches", has=False, beside=beside, why=why
            )
        return self

    @model_validator(mode="after")
    def _diffuses(self) -> Self:
        if "whole_blocks" in traits("decode", self.decode):
            beside = f"decode {self.decode.name}"
            why = "it works on blocks of requests that hold their whole cache, in one process"
            self._alone(beside, why, replicas=True)
            check_beside("preempt", self.preempt, "swaps_cache", has=False, beside=beside, why=why)
            for key, value, good in (
                ("scheduler", self.scheduler.name, self._is_default("scheduler")),
                ("kv", self.kv.name, self._is_default("kv")),
                ("host_tokens", self.host_tokens, not self.host_tokens),
                ("exact", self.exact, not self.exact),
                ("adapters", "some", not self.room_for_adapters),
            ):
                if not good:
                    raise ConfigError(
                        f"{key} = {value} with {beside}: {why}; leave {key} at its default"
                    )
        return self

    @model_validator(mode="after")
    def _lends(self) -> Self:
        if "lends_blocks" in traits("kv", self.kv):
            why = "who holds a lent block knows nothing of copies on the host"
            check_beside(
                "preempt",
                self.preempt,
                "swaps_cache",
                has=False,
                beside=f"kv = {self.kv.name}",
                why=why,
            )
        return self

    def _alone(self, beside: str, why: str, *, replicas: bool = False) -> None:
        """Refuse further ranks, phases and, unless they are allowed, replicas."""
        for key, value, good in (
            ("replicas", self.replicas, self.replicas == 1 or replicas),
            ("parallel", "several ranks", self.parallel.world == self.parallel.depth == 1),
            ("disagg", "two phases", self.disagg is None),
        ):
            if not good:
                raise ConfigError(
                    f"{key} = {value} with {beside}: {why}; leave {key} at its default"
                )

    def _is_default(self, key: str) -> bool:
        """Whether the part is the one of a job that says nothing of it."""
        chosen: Choice = getattr(self, key)
        default: Choice = type(self).model_fields[key].default
        return chosen.name == default.name

    @property
    def room_for_adapters(self) -> int:
        """Adapters that can be in memory."""
        return max(self.max_adapters, len(self.adapters))

    @property
    def limits(self) -> SchedulerLimits:
        """What the scheduler of a concrete job keeps to."""
        assert self.max_position is not None
        return SchedulerLimits(
            max_running=self.max_running,
            max_step_tokens=self.max_step_tokens,
            max_position=self.max_position,
        )

    def threads_of(self, cores: int) -> int:
        """Threads that compute in a replica on a host of so many cores."""
        return self.threads or max(1, (cores - 1) // self.replicas)

    def host_tokens_of(self, kv_tokens: int) -> int:
        """Tokens of the host tier beside a cache of so many."""
        if self.host_tokens is None:
            return 0 if "swaps_cache" not in traits("preempt", self.preempt) else kv_tokens
        return self.host_tokens


@dataclass(frozen=True, kw_only=True)
class ServeWork:
    """What a serving plan is made for, which ``candidates`` of its parts read.

    Args:
        shape: the model.
        job: as it was asked for, with the longest request as ``max_position``.
        arrivals: what comes, in the order of time; at least one.
        room: tokens that the memory of a device has for the cache.
        cost: seconds of a step of an instance.
        drafters: directories of trained drafters and draft models that there are.
    """

    shape: ModelShape
    job: ServeJob
    arrivals: Sequence[Arrival]
    room: int
    cost: StepCost
    drafters: tuple[str, ...] = ()

    @property
    def longest(self) -> int:
        """Most tokens of one request."""
        return max(len(one.prompt) + one.output_tokens for one in self.arrivals)

    @property
    def crowded(self) -> bool:
        """Requests that may run at once have more tokens than the cache."""
        total = sum(len(one.prompt) + one.output_tokens for one in self.arrivals)
        many = min(len(self.arrivals), self.job.max_running) / len(self.arrivals)
        return total * many > (self.job.kv_tokens or self.room)

    @property
    def over_time(self) -> bool:
        """Requests come one after the other, not all at once."""
        return self.arrivals[-1].at > self.arrivals[0].at

    @property
    def one_rank(self) -> bool:
        """One engine of one rank serves."""
        job = self.job
        return job.parallel.world == job.parallel.depth == job.replicas == 1 and job.disagg is None
