"""Launch files for SGLang: ``sglang.yaml`` and what serves it.

Source: Zheng et al., SGLang, 2024; the server arguments of SGLang (0.5).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from shoal.core.files import to_yaml
from shoal.core.parts import part, table
from shoal.ir import ServePlan, TrainPlan
from shoal.plan.emit.phases import first_port, phase_files, phases_of, urls
from shoal.plan.emit.shared import allowed, check_host, header, model_word, script, unexpressed
from shoal.plan.serving.plans import precision_of

__all__ = ["SGLang"]

# Where prefill instances tell decode instances how to fetch from them.
_BOOTSTRAP = 8998
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}

# Why it has words for one part of a kind alone.
WHY = {"scheduler": "it joins requests any time", "kv": "its cache is paged"}


@part
class SGLang:
    """``sglang.yaml``, which ``sglang.launch_server --config`` reads, and ``launch.sh``.

    Args:
        port: where the server listens.
        host: address that it listens on; that of this host alone unless another is given.
        memory: share of the GPU's memory for weights and cache.
    """

    port: Annotated[int, Ge(1), Le(65535)] = 30000
    host: str = "127.0.0.1"
    memory: Annotated[float, Gt(0), Le(1)] = 0.88
    job: ClassVar[Literal["train", "serve"]] = "serve"

    def __post_init__(self) -> None:
        check_host("sglang", self.host)

    def refuses(self, plan: TrainPlan | ServePlan) -> tuple[str, ...]:
        """See :class:`~shoal.plan.emit.protocols.Emitter`."""
        if not isinstance(plan, ServePlan):
            return ("a training plan",)
        job = plan.job
        results = []
        if plan.machine.device.kind == "cpu":
            results.append(
                f"machine = {plan.machine.name}: it serves on accelerators; use llamacpp"
            )
        expresses = {"scheduler": ("fcfs",)} if job.disagg is None else {}
        expresses["kv"] = ("paged",)
        results += unexpressed(job, expresses, WHY)
        return tuple(results)

    def emit(self, plan: TrainPlan | ServePlan) -> dict[str, str]:
        """See :class:`~shoal.plan.emit.protocols.Emitter`."""
        whole = allowed(plan, ServePlan, "sglang", self.refuses(plan))
        if phases_of(whole):
            return self._apart(whole)
        words = [
            "python -m sglang.launch_server",
            f"--model-path {model_word(whole)}",
            '--config "$(dirname "$0")/sglang.yaml"',
        ]
        return {
            "sglang.yaml": header(whole) + to_yaml(self._config(whole)),
            "launch.sh": script(header(whole), words),
        }

    def _apart(self, plan: ServePlan) -> dict[str, str]:
        """A configuration and a script for each phase, and the router before them."""
        configs, commands = {}, {}
        for name, phase in phases_of(plan).items():
            own = self._config(plan)
            del own["port"]
            own |= {"tp-size": phase.tp, "pp-size": phase.pp, "disaggregation-mode": name}
            configs[name] = own
            commands[name] = [
                "python -m sglang.launch_server",
                f"--model-path {model_word(plan)}",
                f'--config "$(dirname "$0")/{name}.yaml"',
                f"--port $(({first_port(self.port, name)} + n))",
                f"--disaggregation-bootstrap-port $(({_BOOTSTRAP} + n))",
                '--disaggregation-transfer-backend "${TRANSFER:-nixl}"',
            ]
        prefill = [
            f"--prefill {url} {_BOOTSTRAP + n}"
            for n, url in enumerate(urls(plan, "prefill", self.port))
        ]
        decode = [f"--decode {url}" for url in urls(plan, "decode", self.port)]
        router = [
            "python -m sglang_router.launch_router --pd-disaggregation",
            *prefill,
            *decode,
            f"--host {self.host} --port {self.port}",
        ]
        return {
            **phase_files(plan, configs, commands),
            "router.sh": script(header(plan), router),
        }

    def _config(self, plan: ServePlan) -> dict[str, Any]:
        job = plan.job
        kv = table("kv").build(job.kv)
        chunked = bool(job.scheduler.options.get("chunked", True))
        config: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "tp-size": job.parallel.tp,
            "pp-size": job.parallel.pp,
            "dtype": DTYPES[precision_of(job)],
            "context-length": job.max_position or plan.shape.max_position,
            "max-running-requests": job.max_running,
            # It counts the tokens of a prompt's part; -1 never cuts a prompt.
            "chunked-prefill-size": job.max_step_tokens if chunked else -1,
            "max-prefill-tokens": job.max_step_tokens,
            "schedule-policy": "fcfs",
            "page-size": kv.block_size,
            "mem-fraction-static": self.memory,
            "random-seed": job.seed,
        }
        if job.kv_tokens is not None:
            config["max-total-tokens"] = job.kv_tokens
        if not kv.prefix_reuse:
            config["disable-radix-cache"] = True
        return config
