"""parallel: executing layouts over ranks, with every byte counted.

The tables of the sharding and of the context-parallel parts, and of those that say how
often data-parallel workers agree. ``comm`` has the
collectives, ``engine`` a training step on one rank, ``check`` the proof that it equals one
process.
"""

from shoal.core.parts import PartTable

__all__ = ["CONTEXTS", "SHARDS", "SYNCS"]

SHARDS = PartTable(
    "shard",
    {
        "replicated": "shoal.parallel.shard.replicated:ReplicatedShard",
        "zero1": "shoal.parallel.shard.zero1:Zero1",
        "zero2": "shoal.parallel.shard.fsdp:Zero2",
        "zero3": "shoal.parallel.shard.fsdp:Zero3",
        "hybrid": "shoal.parallel.shard.hybrid:HybridShard",
        "topo3": "shoal.parallel.shard.topo3:Topo3",
    },
    about=("What is sharded over data-parallel ranks. Chosen by the key `shard` of a job."),
    protocol="shoal.parallel.protocols:Shard",
)

CONTEXTS = PartTable(
    "context",
    {
        "zigzag": "shoal.parallel.context.zigzag:Zigzag",
        "ring": "shoal.parallel.context.ring:RingAttention",
        "rsa": "shoal.parallel.context.rsa:RSA",
        "tokenring": "shoal.parallel.context.tokenring:TokenRing",
        "ulysses": "shoal.parallel.context.ulysses:Ulysses",
        "all_gather": "shoal.parallel.context.all_gather:AllGather",
        "usp": "shoal.parallel.context.usp:USP",
        "double_ring": "shoal.parallel.context.double_ring:DoubleRing",
    },
    about=(
        "Context parallelism: how attention works on a sequence that ranks share. Chosen by the "
        "key "
        "`parallel.context` of a job."
    ),
    protocol="shoal.parallel.protocols:ContextPart",
)

SYNCS = PartTable(
    "sync",
    {
        "every_step": "shoal.parallel.outer.every_step:EveryStep",
        "local_sgd": "shoal.parallel.outer.local_sgd:LocalSGD",
        "diloco": "shoal.parallel.outer.diloco:DiLoCo",
        "co2": "shoal.parallel.outer.co2:CO2",
    },
    about=(
        "How often data-parallel workers synchronize: every step, or once per round of steps. "
        "Chosen by the key `sync` of a job."
    ),
    protocol="shoal.parallel.protocols:SyncPart",
)
