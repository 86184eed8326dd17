"""imports: what other engines' logs say, as measured quantities. Torch-free.

The table of log formats. ``protocols`` says what one promises, ``log`` holds what
they share, and ``measure`` finds the format of a file and sets it beside a plan.
"""

from shoal.core.parts import PartTable

__all__ = ["LOGS"]

# Tried in this order; the one that knows most lines is the file's.
LOGS = PartTable(
    "log",
    {
        "torchtitan": "shoal.cost.imports.torchtitan:TorchtitanLog",
        "megatron": "shoal.cost.imports.megatron:MegatronLog",
        "deepspeed": "shoal.cost.imports.deepspeed:DeepSpeedLog",
        "accelerate": "shoal.cost.imports.accelerate:AccelerateLog",
        "vllm": "shoal.cost.imports.vllm:VLLMLog",
        "sglang": "shoal.cost.imports.sglang:SGLangLog",
        "llamacpp": "shoal.cost.imports.llamacpp:LlamaCppLog",
        "tensorboard": "shoal.cost.imports.tensorboard:TensorBoardLog",
        "wandb": "shoal.cost.imports.wandb:WandbLog",
    },
    about=(
        "Readers for the logs of other engines. Chosen by `shoal score "
        "--import`, with `--format` to override detection."
    ),
    protocol="shoal.cost.imports.protocols:LogReader",
)
