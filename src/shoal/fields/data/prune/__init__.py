"""prune: choosing which labelled or unlabelled examples to keep, by how hard they are.

Start reading at ``protocols.py``, then ``scorers/prototypes.py`` and ``rows.py``, the method of the
job ``curate``. The estimators of scikit-learn's style, ``DataPruner`` and ``PrototypeDifficulty``,
are imported when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable, load_object

if TYPE_CHECKING:
    from shoal.fields.data.prune.estimators import DataPruner, PrototypeDifficulty

__all__ = ["DATA_SCORERS", "DATA_SELECTORS", "DataPruner", "PrototypeDifficulty"]

DATA_SCORERS = PartTable(
    "data_scorer",
    {
        "ssl_prototypes": "shoal.fields.data.prune.scorers.prototypes:SSLPrototypes",
        "prototypes": "shoal.fields.data.prune.scorers.prototypes:SupervisedPrototypes",
        "el2n": "shoal.fields.data.prune.scorers.el2n:EL2N",
        "forgetting": "shoal.fields.data.prune.scorers.forgetting:Forgetting",
        "margin": "shoal.fields.data.prune.scorers.uncertainty:SmallestMargin",
        "entropy": "shoal.fields.data.prune.scorers.uncertainty:PredictionEntropy",
        "disagreement": "shoal.fields.data.prune.scorers.uncertainty:EnsembleDisagreement",
        "memorization": "shoal.fields.data.prune.scorers.subsets:Memorization",
        "influence_max": "shoal.fields.data.prune.scorers.subsets:InfluenceMax",
        "influence_sum": "shoal.fields.data.prune.scorers.subsets:InfluenceSum",
        "random": "shoal.fields.data.prune.scorers.random_order:RandomOrder",
    },
    about=(
        "How hard an example is. Chosen by the key `scorer` of the method `prune` of a job with "
        "`job: curate`."
    ),
    protocol="shoal.fields.data.prune.protocols:DataScorer",
)

DATA_SELECTORS = PartTable(
    "data_selector",
    {
        "balanced": "shoal.fields.data.prune.selectors:KeepBalanced",
        "keep_hardest": "shoal.fields.data.prune.selectors:KeepHardest",
        "keep_easiest": "shoal.fields.data.prune.selectors:KeepEasiest",
    },
    about=(
        "Which of the scored examples are kept. Chosen by the key `selector` of the method `prune` "
        "of a job with `job: curate`."
    ),
    protocol="shoal.fields.data.prune.protocols:DataSelector",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return load_object(f"shoal.fields.data.prune.estimators:{name}")
    raise AttributeError(f"module 'shoal.fields.data.prune' has no attribute {name!r}")
