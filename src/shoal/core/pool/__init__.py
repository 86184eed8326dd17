"""pool: functions and actors on other processes, local or on a cluster.

Open a pool and use it; the calls and results are the same for every part::

    with POOLS.build("local").open() as pool:
        pool.submit(math.sqrt, 2.0).result()
"""

from shoal.core.parts import PartTable
from shoal.core.pool.protocols import Actor, ActorResources, Pool, PoolPart

__all__ = ["POOLS", "Actor", "ActorResources", "Pool", "PoolPart"]

POOLS = PartTable(
    "pool",
    {
        "local": "shoal.core.pool.local:LocalPool",
        "ray": "shoal.core.pool.ray:RayPool",
    },
    about=(
        "Where functions and actors run. Chosen by `launcher` of a serving job, or "
        "`shoal serve --launcher`, and in Python, through `shoal.core.pool`."
    ),
    protocol="shoal.core.pool.protocols:PoolPart",
)
