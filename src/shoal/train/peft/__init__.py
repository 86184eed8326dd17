"""train.peft: fine-tuning that leaves almost all of a model as it is.

The table of its methods. Each is one part with one protocol; what works on tensors is in ``run``,
the files that Hugging Face's ``peft`` reads and writes in ``files``.
"""

from shoal.core.parts import PartTable

__all__ = ["PEFTS"]

PEFTS = PartTable(
    "peft",
    {
        "lora": "shoal.train.peft.lora:Lora",
    },
)
