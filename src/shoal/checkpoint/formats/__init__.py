"""checkpoint.formats: the kinds of checkpoint that are read and written, one a file.

Every format opens as a checkpoint of whole tensors under our names, and writes one. Formats in
which each rank has written its own part go through the universal form, which is kept beside them.
"""

from shoal.core.parts import PartTable

__all__ = ["FORMATS"]

FORMATS = PartTable(
    "checkpoint_format",
    {
        "shoal": "shoal.checkpoint.formats.shoal:ShoalFormat",
        "huggingface": "shoal.checkpoint.formats.huggingface:HuggingFaceFormat",
        "universal": "shoal.checkpoint.formats.universal:UniversalFormat",
        "dcp": "shoal.checkpoint.formats.dcp:DcpFormat",
        "deepspeed": "shoal.checkpoint.formats.deepspeed:DeepSpeedFormat",
        "megatron": "shoal.checkpoint.formats.megatron:MegatronFormat",
    },
    about=(
        "Formats of checkpoints, of Shoal and of other systems. Chosen by `shoal model "
        "convert --to`, and by FORMAT:PATH wherever a checkpoint is named."
    ),
    protocol="shoal.checkpoint.formats.protocols:CheckpointFormat",
)
