"""model: one decoder-only transformer, and how it is stored.

Read in this order: ``config`` (what fixes a model), ``transformer`` (its arithmetic;
``attention``, ``feedforward``, ``rope``, ``norm`` and ``loss`` beside it; ``routing`` and ``gates``
send tokens to experts), ``families``
and ``huggingface`` (directories), ``initialise`` and ``generate``; ``attention_kernels`` are what
attention can be computed with, ``quantize`` makes weights few bits. Only ``config``,
``protocols``, ``families`` and the parts in ``gates``, ``attention_kernels`` and ``quantize`` can
be imported without torch.
"""

from shoal.core.parts import PartTable

__all__ = ["ATTENTION_KERNELS", "FAMILIES", "GATES", "QUANTIZERS"]

FAMILIES = PartTable(
    "family",
    {
        "llama": "shoal.model.families.llama:Llama",
        "qwen2": "shoal.model.families.qwen2:Qwen2",
        "qwen3": "shoal.model.families.qwen3:Qwen3",
        "mixtral": "shoal.model.families.mixtral:Mixtral",
        "parallel": "shoal.model.families.parallel:ParallelBlock",
        "mdlm": "shoal.model.families.mdlm:MaskedDiffusion",
    },
)

GATES = PartTable(
    "gate",
    {
        "softmax": "shoal.model.gates.softmax:Softmax",
        "sigmoid": "shoal.model.gates.sigmoid:Sigmoid",
        "switch": "shoal.model.gates.switch:Switch",
        "gshard": "shoal.model.gates.gshard:GShard",
        "expert_choice": "shoal.model.gates.expert_choice:ExpertChoice",
        "xmoe": "shoal.model.gates.xmoe:XMoE",
    },
)

ATTENTION_KERNELS = PartTable(
    "attention_kernel",
    {
        "naive": "shoal.model.attention_kernels.naive:Naive",
        "sdpa": "shoal.model.attention_kernels.sdpa:SDPA",
        "flash_cpu": "shoal.model.attention_kernels.flash_cpu:FlashCPU",
        "flex": "shoal.model.attention_kernels.flex:Flex",
        "tiled": "shoal.model.attention_kernels.tiled:Tiled",
        "varlen": "shoal.model.attention_kernels.varlen:Varlen",
        "chunked": "shoal.model.attention_kernels.chunked:Chunked",
    },
)

QUANTIZERS = PartTable(
    "quantizer",
    {
        "rtn": "shoal.model.quantize.rtn:RoundToNearest",
        "gptq": "shoal.model.quantize.gptq:GPTQ",
        "awq": "shoal.model.quantize.awq:AWQ",
    },
)
