"""What the emitters share whose servers run on accelerators: what they refuse, and the files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from shoal.core.files import to_yaml
from shoal.core.parts import part
from shoal.ir import ServePlan, TrainPlan
from shoal.plan.emit.phases import phases_of
from shoal.plan.emit.shared import allowed, check_host, header, script, unexpressed

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}

# Why it has words for one part of a kind alone.
_WHY = {"scheduler": "it joins requests any time", "kv": "its cache is paged"}


@part
class GpuServer(ABC):
    """An engine with a configuration file that joins requests at any time and pages its cache.

    Args:
        port: port of the server.
        host: address of the server; by default it accepts connections from this host only.
        memory: share of the GPU's memory for weights, activations and cache.
    """

    port: Annotated[int, Ge(1), Le(65535)] = 8000
    host: str = "127.0.0.1"
    memory: Annotated[float, Gt(0), Le(1)] = 0.9
    job: ClassVar[Literal["train", "serve"]] = "serve"
    engine: ClassVar[str]

    def __post_init__(self) -> None:
        check_host(self.engine, self.host)

    def refuses(self, plan: TrainPlan | ServePlan) -> tuple[str, ...]:
        if not isinstance(plan, ServePlan):
            return ("a training plan",)
        job = plan.job
        results = []
        if plan.machine.device.kind == "cpu":
            results.append(
                f"machine = {plan.machine.name}: it serves on accelerators; use llamacpp"
            )
        expresses = {"scheduler": ("fcfs",)} if job.disagg is None else {}
        expresses |= {"kv": ("paged",), "kv_format": ("plain",), "memory": ("resident",)}
        expresses |= {"preempt": ("recompute",)}
        results += unexpressed(job, expresses, _WHY)
        if job.weights == "plain" != plan.shape.weights:
            results.append(
                f"weights = plain: the files of {plan.shape.name} hold {plan.shape.weights}, and "
                f"it computes with what they hold; use weights = {plan.shape.weights}"
            )
        if job.speculative is not None:
            results.append(f"speculative = {job.speculative.name}: it has guesses of its own")
        return (*results, *self._refuses(plan))

    def emit(self, plan: TrainPlan | ServePlan) -> dict[str, str]:
        whole = allowed(plan, ServePlan, self.engine, self.refuses(plan))
        if phases_of(whole):
            return self._apart(whole)
        config = f"{self.engine}.yaml"
        return {
            config: header(whole) + to_yaml(self._config(whole)),
            "launch.sh": script(header(whole), self._command(whole, config)),
        }

    def _refuses(self, plan: ServePlan) -> list[str]:
        """What this engine has no word for beside that."""
        return []

    @abstractmethod
    def _config(self, plan: ServePlan) -> dict[str, Any]:
        """Its configuration file."""

    @abstractmethod
    def _command(self, plan: ServePlan, config: str) -> list[str]:
        """The words that start it with a configuration file beside the script."""

    @abstractmethod
    def _apart(self, plan: ServePlan) -> dict[str, str]:
        """A configuration and a script for each phase, and what stands before them."""
