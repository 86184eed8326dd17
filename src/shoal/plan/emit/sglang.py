"""Launch files for SGLang: ``sglang.yaml`` and what serves it.

Source: Zheng et al., SGLang, 2024; the server arguments of SGLang (0.5).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le

from shoal.core.parts import part, table
from shoal.ir import ServePlan
from shoal.plan.emit.gpu_server import DTYPES, GpuServer
from shoal.plan.emit.phases import first_port, phase_files, phases_of, urls
from shoal.plan.emit.shared import header, model_word, nodes_of, quantized, script
from shoal.plan.serving.inputs import precision_of

# Where decode instances learn how to fetch from prefill instances.
_BOOTSTRAP = 8998
# Where the nodes of a server meet.
_MEET = 20_000


@part
class SGLang(GpuServer):
    """``sglang.yaml``, which ``sglang.launch_server --config`` reads, and ``launch.sh``.

    Args:
        port: port of the server.
        memory: share of the GPU's memory for weights and cache.
    """

    port: Annotated[int, Ge(1), Le(65535)] = 30000
    memory: Annotated[float, Gt(0), Le(1)] = 0.88
    engine: ClassVar[str] = "sglang"

    def _command(self, plan: ServePlan, config: str) -> list[str]:
        words = [
            "python -m sglang.launch_server",
            f"--model-path {model_word(plan)}",
            f'--config "$(dirname "$0")/{config}"',
        ]
        nodes, _ = nodes_of(plan)
        if nodes > 1:
            usage = "on node N, from 0: sh launch.sh N ADDRESS_OF_NODE_0"
            words += [
                f"--nnodes {nodes}",
                f'--node-rank "${{1:?{usage}}}"',
                f'--dist-init-addr "${{2:?{usage}}}:{_MEET}"',
            ]
        return words

    def _apart(self, plan: ServePlan) -> dict[str, str]:
        configs, commands = {}, {}
        for name, phase in phases_of(plan).items():
            own = self._config(plan)
            del own["port"]
            own |= {"tp-size": phase.tp, "pp-size": phase.pp, "disaggregation-mode": name}
            configs[name] = own
            commands[name] = [
                *self._command(plan, f"{name}.yaml"),
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
        kv, dp = table("kv").build(job.kv), job.parallel.dp
        chunked = bool(job.scheduler.options.get("chunked", True))
        config: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "tp-size": job.parallel.tp * dp,
            "pp-size": job.parallel.pp,
            "dtype": DTYPES[precision_of(job)],
            "context-length": job.max_position or plan.shape.max_position,
            # It divides these limits among groups with attention of their own.
            "max-running-requests": dp * job.max_running,
            # It counts the tokens of a prompt's part; -1 never cuts a prompt.
            "chunked-prefill-size": dp * job.max_step_tokens if chunked else -1,
            "max-prefill-tokens": job.max_step_tokens,
            "schedule-policy": "fcfs",
            "page-size": kv.block_size,
            "mem-fraction-static": self.memory,
            "random-seed": job.seed,
            **quantized(plan),
        }
        if job.kv_tokens is not None:
            config["max-total-tokens"] = job.kv_tokens // dp
        if dp > 1:
            config |= {"dp-size": dp, "enable-dp-attention": True}
        if job.parallel.ep > 1:
            config["ep-size"] = job.parallel.ep
        if not kv.prefix_reuse:
            config["disable-radix-cache"] = True
        return config
