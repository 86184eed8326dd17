"""predictions: Shoal's beside those of peers, on the same published runs, with both errors.

Start reading at ``comparison.py``; ``peer`` asks AIConfigurator, whose process runs
``drivers/of_aiconfigurator.py`` in an environment of its own.
"""

from shoal.claims.bench.predictions.comparison import PredictionTable, PredictorErrors, compare

__all__ = ["PredictionTable", "PredictorErrors", "compare"]
