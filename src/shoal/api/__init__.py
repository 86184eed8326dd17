"""api: what Python calls for everything that the command line does.

``shoal.plan(...)`` and the other functions of :mod:`shoal` are these. Importing this room loads no
torch.
"""

from shoal.api.loading import load
from shoal.api.planning import plan
from shoal.api.plans import Plans
from shoal.api.running import run
from shoal.api.serving import serve
from shoal.api.tools import check, explain, import_log, probe, score
from shoal.api.training import train

__all__ = [
    "Plans",
    "check",
    "explain",
    "import_log",
    "load",
    "plan",
    "probe",
    "run",
    "score",
    "serve",
    "train",
]
