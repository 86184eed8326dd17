"""checkpoint.universal: what ranks dumped becomes one file for each parameter, for any new split.

A rank saves what it holds, in the cheapest form. Later, and only if a user wants another
split, the fragments of each parameter are put together by patterns over names.

- ``spec``: the small language: names, and how the fragments of a parameter combine.
- ``patterns``: the rules themselves.
- ``extract``: fragments out of rank files. ``union``: fragments to whole parameters.
- ``atomic``: the result, a directory with a file for each parameter and moment.
- ``convert``: all of it, once, kept beside the source.
- ``generate``: what a rank of any split reads of it.

Source: Lian et al., Universal Checkpointing, 2024.
"""

from shoal.core.parts import PartTable

__all__ = ["PATTERNS"]

PATTERNS = PartTable(
    "pattern",
    {
        "unique": "shoal.checkpoint.universal.patterns.whole:UniquePattern",
        "replicated": "shoal.checkpoint.universal.patterns.whole:ReplicatedPattern",
        "average": "shoal.checkpoint.universal.patterns.whole:AveragePattern",
        "fragment": "shoal.checkpoint.universal.patterns.fragment:FragmentPattern",
        "fused": "shoal.checkpoint.universal.patterns.fused:FusedPattern",
        "moe": "shoal.checkpoint.universal.patterns.moe:MoePattern",
    },
    about=(
        "How the fragments of a parameter on different ranks combine. Chosen by the rules of a "
        "spec, `shoal model convert --spec`."
    ),
    protocol="shoal.checkpoint.universal.protocols:Pattern",
)
