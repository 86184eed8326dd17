"""projektor: choosing how much to take of each source, by probes on the few rows that are revealed.

Start reading at ``model.py``, the predictor; ``distance.py`` has optimal transport with labels,
``surface.py`` the two stages, and ``rows.py`` the method of the job ``curate``.
"""

from shoal.fields.data.curate.projektor.model import MixtureChoice, Projektor

__all__ = ["MixtureChoice", "Projektor"]
