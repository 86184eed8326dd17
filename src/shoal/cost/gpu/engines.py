"""Engines that plans are handed over to, as their documentation and code say that they run a step.

Sources: NVIDIA, Megatron-LM, arguments of Megatron Core 0.12 and later (overlapped tensor and
pipeline communication, distributed optimizer); Liang et al., TorchTitan, 2024; Microsoft,
DeepSpeed, configuration (``communication_data_type``, ``overlap_comm``); Hugging Face, Accelerate,
FSDP plugin (``MixedPrecision`` in the type of the job).
"""

from __future__ import annotations

from shoal.cost.gpu.spec import EngineSpec

__all__ = ["ACCELERATE", "DEEPSPEED", "MEGATRON", "TORCHTITAN"]

MEGATRON = EngineSpec(
    "Megatron-Core", attention="best", tensor_overlap=0.6, pipe_overlap=True, dedup=True
)
TORCHTITAN = EngineSpec("torchtitan", style="eager", attention="flash2")
# Training scripts of Hugging Face models; gradients travel in the type of the job.
DEEPSPEED = EngineSpec("DeepSpeed", style="eager", attention="flash2", grad_bytes=2.0)
ACCELERATE = EngineSpec("Accelerate, FSDP", style="eager", attention="flash2", grad_bytes=2.0)
