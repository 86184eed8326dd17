"""model: one decoder-only transformer, and how it is stored.

Read in this order: ``config`` (what fixes a model), ``transformer`` (its arithmetic;
``attention``, ``feedforward``, ``rope``, ``norm`` and ``loss`` beside it), ``families``
and ``huggingface`` (directories), ``initialise`` and ``generate``. Only ``config``,
``protocols`` and ``families`` can be imported without torch.
"""

from shoal.core.parts import PartTable

__all__ = ["FAMILIES"]

FAMILIES = PartTable(
    "family",
    {
        "llama": "shoal.model.families.llama:Llama",
        "qwen2": "shoal.model.families.qwen2:Qwen2",
        "qwen3": "shoal.model.families.qwen3:Qwen3",
        "mixtral": "shoal.model.families.mixtral:Mixtral",
    },
)
