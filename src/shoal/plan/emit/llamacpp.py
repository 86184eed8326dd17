"""Launch files for llama.cpp: the arguments of ``llama-server``.

Source: the arguments of llama.cpp's server, 2026.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from shoal.core.parts import part, table
from shoal.core.traits import traits
from shoal.ir import ServePlan, TrainPlan
from shoal.plan.emit.shared import allowed, check_host, header, option, script
from shoal.plan.serving.inputs import precision_of

# Sequences that one of its contexts can hold.
MOST_SLOTS = 256
CACHE = {"bf16": "bf16", "fp32": "f32"}


@part
class LlamaCpp:
    """``launch.sh``, which starts ``llama-server`` on a GGUF file.

    Args:
        port: port of the server.
        host: address of the server; by default it accepts connections from this host only.
    """

    port: Annotated[int, Ge(1), Le(65535)] = 8080
    host: str = "127.0.0.1"
    job: ClassVar[Literal["train", "serve"]] = "serve"

    def __post_init__(self) -> None:
        check_host("llamacpp", self.host)

    def refuses(self, plan: TrainPlan | ServePlan) -> tuple[str, ...]:
        if not isinstance(plan, ServePlan):
            return ("a training plan",)
        job = plan.job
        results = []
        if job.disagg is not None:
            results.append("disagg: one server does both phases; plan without --slo")
        if job.parallel.world > 1:
            split = f"tp = {job.parallel.tp}, pp = {job.parallel.pp}"
            results.append(f"parallel {split}: it is one process; use vllm or sglang")
        if "prompts_apart" in traits("scheduler", job.scheduler):
            results.append(
                f"scheduler = {job.scheduler.name}: it mixes prompts and answers; use fcfs"
            )
        if job.max_running > MOST_SLOTS:
            results.append(f"max_running = {job.max_running}: it has at most {MOST_SLOTS} slots")
        if not job.scheduler.options.get("chunked", True):
            results.append("scheduler.chunked = false: it cuts long prompts; use true")
        return tuple(results)

    def emit(self, plan: TrainPlan | ServePlan) -> dict[str, str]:
        whole = allowed(plan, ServePlan, "llamacpp", self.refuses(plan))
        job = whole.job
        most = job.max_position or whole.shape.max_position
        paged = "fixed_size_blocks" in traits("kv", job.kv)
        fixed = "fixed_batches" in traits("scheduler", job.scheduler)
        # Its context is shared by all slots, or parted evenly among them.
        context = (job.kv_tokens or most * job.max_running) if paged else most * job.max_running
        kind = CACHE[precision_of(job)]
        words = [
            "llama-server",
            '--model "${MODEL:?set MODEL to a GGUF file of ' + job.model + '}"',
            option("--host", self.host),
            option("--port", self.port),
            option("--ctx-size", context),
            option("--parallel", job.max_running),
            option("--batch-size", job.max_step_tokens),
            option("--ubatch-size", job.max_step_tokens),
            "--kv-unified" if paged else "--no-kv-unified",
            "--no-cont-batching" if fixed else "--cont-batching",
            option("--cache-type-k", kind),
            option("--cache-type-v", kind),
            option("--seed", job.seed),
        ]
        if not getattr(table("kv").build(job.kv), "prefix_reuse", False):
            words.append("--no-cache-prompt")
        if whole.machine.device.kind == "cpu":
            words.append(option("--threads", job.threads_of(whole.machine.device.num_cores or 1)))
            words.append(option("--n-gpu-layers", 0))
        else:
            words.append(option("--n-gpu-layers", 999))
        return {"launch.sh": script(header(whole), words)}
