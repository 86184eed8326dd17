"""serve: answering requests with a trained model.

The door, with the tables of where weights lie and of how text is decoded. ``engine`` is the loop of
plan, execute and commit; ``runner`` computes, and ``workers`` where ranks share the model;
``process`` keeps the engine in a process of its own; ``api`` speaks HTTP.
"""

from shoal.core.parts import PartTable

__all__ = ["DECODES", "MEMORIES"]

DECODES = PartTable(
    "decode",
    {
        "autoregressive": "shoal.serve.decode.autoregressive:Autoregressive",
        "diffusion": "shoal.serve.decode.diffusion.part:Diffusion",
    },
)

MEMORIES = PartTable(
    "memory",
    {
        "resident": "shoal.serve.memory:Resident",
        "peer": "shoal.serve.memory:Peer",
        "superpipeline": "shoal.serve.superpipeline:Superpipeline",
    },
)
