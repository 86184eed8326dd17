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
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        dp: data-parallel attention: groups of ``tp`` ranks with their own requests and shared
            experts; limits of a step apply to a group.
        ep: ranks that divide the experts of a layer; each expert is split over the others.
        in_flight: steps in flight; None for the number of stages.
    """

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    dp: PositiveInt = 1
    ep: PositiveInt = 1
    in_flight: PositiveInt | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

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
        scheduler: which requests run in the next step.
        disagg: separate prefill and decode instances; None computes both in one engine.
        parallel: ranks that share the model; one process without.
        kv: how cache blocks are managed.
        kv_tokens: cache size of an instance in tokens; None: what fits in memory, up to
            ``max_running`` requests of full length.
        preempt: what happens to the cache of a preempted request.
        host_tokens: cache size in host memory in tokens; None: that of the cache, or none with
            ``preempt = recompute``.
        kv_format: storage format of keys and values.
        weights: format of the matrices of linear layers, such as int4-g128; plain leaves them in
            the precision of the job. A directory that is quantized has its own.
        memory: where the weights of the layers are stored.
        kernel: operator -> backend; the fastest one for other operators.
        decode: the decoding method: autoregressive, by concurrent workers, or by masked diffusion.
        exact: results of a request are bit-identical, independent of other requests.
        speculative: speculative decoding; None decodes one token per step.
        lossless: reject acceptance rules that change the output distribution.
        max_running: maximum number of requests in a step.
        max_step_tokens: maximum number of tokens in a step; long prompts are split.
        max_position: maximum tokens of a request, prompt and output; None for the model's maximum.
        adapters: model name in requests -> adapter directory, loaded with the model.
        max_adapters: maximum number of adapters in memory; 0 for those of ``adapters`` only.
        max_adapter_rank: largest rank of an adapter.
        threads: compute threads; 0 for all cores but one, which serves HTTP. Replicas share them.
        replicas: number of engines behind one address.
        balancer: how requests are assigned to replicas.
        launcher: where replicas run: processes of this machine, or actors of a Ray cluster.
        engine: the program that a plan is priced for: shoal, vllm, sglang, trtllm or llamacpp.
            Only shoal runs here.
        workload: the workload, for planning and benchmarks.
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
    engine: Literal["shoal", "vllm", "sglang", "trtllm", "llamacpp"] = "shoal"
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
