"""checkpoint.inmemory: the newest state in the memory of processes that outlive the trainers.

- ``protocols``: what a code over the members of a group promises; ``xor``, ``rs``, ``copies``.
- ``field``, ``stripes``: arithmetic over GF(256); which block is coded with which.
- ``process``, ``wire``: the snapshot process of a rank, and how one talks to it.
- ``layout``, ``snapshot``: what a trainer keeps, and how it gets there beside the computation.
- ``fleet``, ``recovery``: starting and replacing the processes; the ladder after a failure.
- ``persist``: a version from memory to the disk, without the trainers.
"""

from shoal.core.parts import PartTable

__all__ = ["MEMORY_CODES"]

MEMORY_CODES = PartTable(
    "memory_code",
    {
        "xor": "shoal.checkpoint.inmemory.xor:Xor",
        "rs": "shoal.checkpoint.inmemory.rs:ReedSolomon",
        "copies": "shoal.checkpoint.inmemory.copies:ReplicaCode",
    },
    about=(
        "How in-memory checkpoints are coded over nodes. Chosen by "
        "the key `checkpoint.memory` of a training job."
    ),
    protocol="shoal.checkpoint.inmemory.protocols:MemoryCode",
)
