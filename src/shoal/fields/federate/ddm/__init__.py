"""ddm: diffusion experts on clusters of the data, trained without a byte between them.

Start reading at ``protocols.py``, then ``partition.py``, ``training.py`` and ``ensemble.py``.
:func:`sample` draws from the directory of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable, load_object

if TYPE_CHECKING:
    from shoal.fields.federate.ddm.ensemble import Ensemble, load_ensemble, sample

__all__ = ["EXPERT_MIXTURES", "FLOW_TRAININGS", "Ensemble", "load_ensemble", "sample"]

FLOW_TRAININGS = PartTable(
    "flow_training",
    {
        "experts": "shoal.fields.federate.ddm.experts:DiffusionExperts",
        "monolith": "shoal.fields.federate.ddm.monolith:Monolith",
    },
    about=(
        "How a budget of training samples becomes diffusion models. Chosen by the key `method` of "
        "a job with `job: train_experts`."
    ),
    protocol="shoal.fields.federate.ddm.protocols:FlowTraining",
)

EXPERT_MIXTURES = PartTable(
    "expert_mixture",
    {
        "full": "shoal.fields.federate.ddm.mixtures:Full",
        "top1": "shoal.fields.federate.ddm.mixtures:TopOne",
        "topm": "shoal.fields.federate.ddm.mixtures:TopM",
        "sample": "shoal.fields.federate.ddm.mixtures:SampledExpert",
    },
    about=(
        "Which experts work in a step of the sampler, and with what weight. Chosen by the key "
        "`mixture` of a job with `job: train_experts`, and by `mode` of `sample`."
    ),
    protocol="shoal.fields.federate.ddm.protocols:ExpertMixture",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return load_object(f"shoal.fields.federate.ddm.ensemble:{name}")
    raise AttributeError(f"module 'shoal.fields.federate.ddm' has no attribute {name!r}")
