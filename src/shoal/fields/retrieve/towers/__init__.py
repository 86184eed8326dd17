"""towers: the job that trains a pair of text encoders, and shrinks that of queries.

Start reading at ``protocols.py``, then ``tower.py``, ``contrastive.py`` and ``distil.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable, load_object

if TYPE_CHECKING:
    from shoal.fields.retrieve.towers.distil import error_bounds, unchanged
    from shoal.fields.retrieve.towers.pair import TowerPair
    from shoal.fields.retrieve.towers.pairs import read_pairs

__all__ = ["TOWER_TRAININGS", "TowerPair", "error_bounds", "read_pairs", "unchanged"]

TOWER_TRAININGS = PartTable(
    "tower_training",
    {
        "two_stage": "shoal.fields.retrieve.towers.two_stage:TwoStage",
        "end_to_end": "shoal.fields.retrieve.towers.end_to_end:EndToEnd",
    },
    about=(
        "How a pair of text encoders is trained. Chosen by the key `method` of a job with "
        "`job: train_towers`."
    ),
    protocol="shoal.fields.retrieve.towers.protocols:TowerTraining",
)

_PLACES = {
    "TowerPair": "pair",
    "error_bounds": "distil",
    "read_pairs": "pairs",
    "unchanged": "distil",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return load_object(f"shoal.fields.retrieve.towers.{_PLACES[name]}:{name}")
    raise AttributeError(f"module 'shoal.fields.retrieve.towers' has no attribute {name!r}")
