"""emit: a plan as the launch files of another engine, one engine a file. Torch-free.

The table of emitters. ``protocols`` says what one promises, ``shared`` holds what
several need.
"""

from shoal.core.parts import PartTable

__all__ = ["EMITTERS"]

EMITTERS = PartTable(
    "emitter",
    {
        "torchtitan": "shoal.plan.emit.torchtitan:Torchtitan",
        "megatron": "shoal.plan.emit.megatron:Megatron",
        "deepspeed": "shoal.plan.emit.deepspeed:DeepSpeed",
        "accelerate": "shoal.plan.emit.accelerate:Accelerate",
        "vllm": "shoal.plan.emit.vllm:VLLM",
        "sglang": "shoal.plan.emit.sglang:SGLang",
        "llamacpp": "shoal.plan.emit.llamacpp:LlamaCpp",
    },
    about=(
        "Writers of launch files for other engines. Chosen by `shoal plan train "
        "--emit` and `shoal plan serve --emit`."
    ),
    protocol="shoal.plan.emit.protocols:Emitter",
)
