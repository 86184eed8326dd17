"""serve: answering requests with a trained model.

The table of where weights lie. ``engine`` is the loop of plan, execute and commit;
``runner`` computes, and ``workers`` where ranks share the model; ``process`` keeps the engine in a
process of its own; ``api`` speaks HTTP.
"""

from shoal.core.parts import PartTable

__all__ = ["MEMORIES"]

MEMORIES = PartTable(
    "memory",
    {
        "resident": "shoal.serve.cache.weights:Resident",
        "peer": "shoal.serve.cache.weights:PeerMemory",
        "superpipeline": "shoal.serve.cache.superpipeline:SuperpipelineMemory",
    },
    about=(
        "Where the weights of the layers are stored. Chosen by the key `memory` of a serving job."
    ),
    protocol="shoal.serve.cache.weights:MemoryPart",
)
