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
        "rslora": "shoal.train.peft.rslora:RsLora",
        "dora": "shoal.train.peft.dora:Dora",
        "adalora": "shoal.train.peft.adalora:AdaLora",
        "dylora": "shoal.train.peft.dylora:DyLora",
        "lora_fa": "shoal.train.peft.lora_fa:LoraFA",
        "vera": "shoal.train.peft.vera:Vera",
        "krona": "shoal.train.peft.krona:KronA",
        "qlora": "shoal.train.peft.qlora:QLora",
        "loftq": "shoal.train.peft.loftq:LoftQ",
        "adapter": "shoal.train.peft.adapter:Adapter",
        "parallel_adapter": "shoal.train.peft.parallel_adapter:ParallelAdapter",
        "adapter_drop": "shoal.train.peft.adapter_drop:AdapterDrop",
        "compacter": "shoal.train.peft.compacter:Compacter",
        "prompt": "shoal.train.peft.prompt:PromptTuning",
        "prefix": "shoal.train.peft.prefix:PrefixTuning",
        "streams": "shoal.train.peft.streams:ParallelStreams",
        "ia3": "shoal.train.peft.ia3:IA3",
        "ssf": "shoal.train.peft.ssf:SSF",
        "bitfit": "shoal.train.peft.bitfit:BitFit",
        "fishmask": "shoal.train.peft.fishmask:FishMask",
        "pafi": "shoal.train.peft.pafi:PaFi",
        "diff_pruning": "shoal.train.peft.diff_pruning:DiffPruning",
        "ladder": "shoal.train.peft.ladder:Ladder",
        "mam": "shoal.train.peft.mam:Mam",
        "unipelt": "shoal.train.peft.unipelt:UniPelt",
        "offsite": "shoal.train.peft.offsite:Offsite",
        "mezo": "shoal.train.peft.mezo:MeZO",
    },
    about=(
        "Parameter-efficient fine-tuning methods. Chosen by the key `finetune` of a training job."
    ),
    protocol="shoal.train.peft.protocols:PeftMethod",
)
