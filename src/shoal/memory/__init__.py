"""memory: state that does not fit: tiers, what moves between them, and who streams what.

- ``tier``: a place of so many bytes: budgeted memory of a device or a host.
- ``device``: what a computation keeps alive, counted against the device's budget.
- ``disk``: a place in a file, past the system's cache of pages.
- ``mover``: copies from one place to another, each way with a thread of its own.
- ``tiers``: the places of one run and the ways between them.
- ``stream``: parameters come to the device when they are needed, and gradients leave it.
- ``subgroups``: the update of what lies in slow tiers.
- ``superpipeline``: a model that runs with a window of its blocks on the device.
- ``fuyou``: an optimizer process that updates during the backward pass, and activations that are
  sent to a disk as far as that pays.
- ``deep_optimizer_states``: an update that host and device share.
- ``activation``: what autograd saves, and who keeps it; ``ssdtrain`` keeps it on a disk.
"""

from shoal.core.parts import PartTable

__all__ = ["ACTIVATIONS", "OFFLOADS"]

ACTIVATIONS = PartTable(
    "activation",
    {
        "keep": "shoal.memory.activations.protocol:Keep",
        "ssdtrain": "shoal.memory.activations.ssdtrain:SSDTrain",
    },
    about=(
        "Where activations saved for the backward pass are stored. Chosen by the key "
        "`activation` of a job."
    ),
    protocol="shoal.memory.activations.protocol:Activation",
)

OFFLOADS = PartTable(
    "offload",
    {
        "zero_infinity": "shoal.memory.offload.zero_infinity:ZeroInfinity",
        "superpipeline": "shoal.memory.offload.windowed:SuperpipelineOffload",
        "fuyou": "shoal.memory.fuyou.part:Fuyou",
        "deep_optimizer_states": "shoal.memory.offload.deep_optimizer_states:DeepOptimizerStates",
    },
    about=(
        "Which state of a model is in host memory or on disk. Chosen by the key `offload` of a job."
    ),
    protocol="shoal.memory.protocols:Offload",
)
