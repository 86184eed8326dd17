"""model: one decoder-only transformer, and how it is stored.

Read in this order: ``config`` (what fixes a model), ``transformer`` (its arithmetic;
``attention``, ``feedforward``, ``rope``, ``norm`` and ``loss`` beside it; ``routing`` and ``gates``
send tokens to experts), ``families``
and ``huggingface`` (directories), ``initialise`` and ``generate``; ``quantize`` makes weights few
bits. Only ``config``, ``protocols``, ``families`` and the parts in ``gates`` and ``quantize`` can
be imported without torch.
"""

from shoal.core.parts import PartTable

__all__ = ["FAMILIES", "GATES", "QUANTIZERS"]

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
    about=(
        "How a Hugging Face directory corresponds to the model. Detected from the directory's "
        "`config.json`."
    ),
    protocol="shoal.model.protocols:Family",
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
    about=(
        "How tokens are routed to experts. Chosen by "
        "`architecture.moe.gate` of a training job, of `shoal model convert`, and of a shape "
        "file."
    ),
    protocol="shoal.model.protocols:Gate",
)

QUANTIZERS = PartTable(
    "quantizer",
    {
        "rtn": "shoal.model.quantize.rtn:RoundToNearest",
        "gptq": "shoal.model.quantize.gptq:GPTQ",
        "awq": "shoal.model.quantize.awq:AWQ",
    },
    about=("How weights are quantized. Chosen by `shoal model quantize --method`."),
    protocol="shoal.model.protocols:Quantizer",
)
