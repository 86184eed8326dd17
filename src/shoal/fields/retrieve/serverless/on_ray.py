"""The back-end ``ray``: containers are actors of a Ray cluster."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.core.pool.ray import RayPool
from shoal.fields.retrieve.serverless.processes import PooledHost


@part
class RayFunctions:
    """Functions as actors of a Ray cluster, whose nodes share the directory of the index.

    Args:
        address: of a running cluster; empty for ``$RAY_ADDRESS``, or one on this machine that ends
            with the runtime.
    """

    address: str = ""

    call_s: ClassVar = 4e-3  # the cluster's own call, and HTTP for calls of functions by functions
    cold_s: ClassVar = 1.5  # a worker of the cluster
    memory_bytes: ClassVar = 1.2e8

    def open(self) -> PooledHost:
        """Join or start the cluster.

        Raises:
            MissingExtraError: Ray is not installed.
            RankError: there is no cluster at the address.
        """
        # Containers wait for each other, so none may wait for a processor.
        pool = RayPool(address=self.address, cpus_per_actor=0.0).open()
        return PooledHost(pool, pool.address)

    def cores(self, available: int) -> int:
        return available
