"""Launch files for vLLM: ``vllm.yaml`` and what serves it.

Source: Kwon et al., PagedAttention, 2023; the engine arguments of vLLM (0.11 and later).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le

from shoal.core.parts import part, table
from shoal.core.traits import traits
from shoal.ir import ServePlan
from shoal.plan.emit.gpu_server import DTYPES, GpuServer
from shoal.plan.emit.phases import first_port, phase_files, phases_of
from shoal.plan.emit.shared import header, model_word, nodes_of, quantized, script
from shoal.plan.serving.inputs import precision_of

BLOCKS = (8, 16, 32, 64, 128)
# Where instances exchange how to fetch from them.
_SIDE_CHANNEL = 5600
_CONNECTOR = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


@part
class VLLM(GpuServer):
    """``vllm.yaml``, which ``vllm serve --config`` reads, and ``launch.sh``.

    Args:
        port: port of the server.
        memory: share of the GPU's memory for weights, activations and cache.
    """

    port: Annotated[int, Ge(1), Le(65535)] = 8000
    memory: Annotated[float, Gt(0), Le(1)] = 0.92
    engine: ClassVar[str] = "vllm"

    def _refuses(self, plan: ServePlan) -> list[str]:
        job = plan.job
        results = []
        if job.parallel.ep not in (1, job.parallel.tp * job.parallel.dp):
            results.append(f"parallel.ep = {job.parallel.ep}: use 1, or tp x dp")
        block = getattr(table("kv").build(job.kv), "block_size", BLOCKS[0])
        if "fixed_size_blocks" in traits("kv", job.kv) and block not in BLOCKS:
            words = ", ".join(map(str, BLOCKS))
            results.append(f"kv.{job.kv.name}.block_size = {block}: use {words}")
        most = job.max_position or plan.shape.max_position
        if not _chunked(job.scheduler.options) and job.max_step_tokens < most:
            results.append(
                f"scheduler.chunked = false with max_step_tokens = {job.max_step_tokens} below "
                f"max_position = {most}: raise the first or cut prompts"
            )
        return results

    def _command(self, plan: ServePlan, config: str) -> list[str]:
        words = ["vllm serve", model_word(plan), f'--config "$(dirname "$0")/{config}"']
        nodes, _ = nodes_of(plan)
        if nodes > 1:
            joined = f"ray start on {nodes} nodes first, and then give its address"
            words[0] = f'env RAY_ADDRESS="${{RAY_ADDRESS:?{joined}}}" vllm serve'
        return words

    def _apart(self, plan: ServePlan) -> dict[str, str]:
        configs, commands = {}, {}
        for place, (name, phase) in enumerate(phases_of(plan).items()):
            own = self._config(plan)
            del own["port"]
            own |= {"tensor-parallel-size": phase.tp, "pipeline-parallel-size": phase.pp}
            configs[name] = own
            # Each rank listens on a port of its own for those that fetch from it.
            side = _SIDE_CHANNEL + 100 * place
            commands[name] = [
                f"env VLLM_NIXL_SIDE_CHANNEL_PORT=$(({side} + n * {phase.tp * phase.pp}))",
                *self._command(plan, f"{name}.yaml"),
                f"--port $(({first_port(self.port, name)} + n))",
                f"--kv-transfer-config '{_CONNECTOR}'",
            ]
        proxy = ['python "${PROXY:?set PROXY to toy_proxy_server.py of vLLM}"']
        for name, flag in (("prefill", "prefiller"), ("decode", "decoder")):
            first = first_port(self.port, name)
            count = phases_of(plan)[name].count
            proxy.append(f"--{flag}-hosts {' '.join(['127.0.0.1'] * count)}")
            proxy.append(f"--{flag}-ports {' '.join(str(first + n) for n in range(count))}")
        proxy.append(f"--host {self.host} --port {self.port}")
        return {
            **phase_files(plan, configs, commands),
            "router.sh": script(header(plan), proxy),
        }

    def _config(self, plan: ServePlan) -> dict[str, Any]:
        job = plan.job
        kv = table("kv").build(job.kv)
        config: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "tensor-parallel-size": job.parallel.tp,
            "pipeline-parallel-size": job.parallel.pp,
            "dtype": DTYPES[precision_of(job)],
            "max-model-len": job.max_position or plan.shape.max_position,
            "max-num-seqs": job.max_running,
            "max-num-batched-tokens": job.max_step_tokens,
            "gpu-memory-utilization": self.memory,
            "block-size": kv.block_size,
            "seed": job.seed,
            **quantized(plan),
        }
        if job.kv_tokens is not None:
            config["num-gpu-blocks-override"] = job.kv_tokens // job.parallel.dp // kv.block_size
        if job.parallel.dp > 1:
            config["data-parallel-size"] = job.parallel.dp
        if job.parallel.ep > 1:
            config["enable-expert-parallel"] = True
        if nodes_of(plan)[0] > 1:  # which join a Ray cluster before it starts
            config["distributed-executor-backend"] = "ray"
            if job.parallel.dp > 1:
                config["data-parallel-backend"] = "ray"
        # A switch of its configuration file can be set, not unset: the other one is.
        config["enable-prefix-caching" if kv.prefix_reuse else "no-enable-prefix-caching"] = True
        chunked = _chunked(job.scheduler.options)
        config["enable-chunked-prefill" if chunked else "no-enable-chunked-prefill"] = True
        return config


def _chunked(options: dict[str, Any]) -> bool:
    return bool(options.get("chunked", True))
