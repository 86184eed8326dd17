"""parallel: executing layouts over ranks, with every byte counted.

The door: the table of sharding parts. ``comm`` has the collectives.
"""

from shoal.core.parts import PartTable

__all__ = ["SHARDS"]

SHARDS = PartTable(
    "shard",
    {
        "replicated": "shoal.parallel.shard.replicated:Replicated",
        "zero1": "shoal.parallel.shard.zero1:Zero1",
        "zero2": "shoal.parallel.shard.fsdp:Zero2",
        "zero3": "shoal.parallel.shard.fsdp:Zero3",
    },
)
