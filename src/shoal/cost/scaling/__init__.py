"""cost.scaling: laws of learning curves, one fitter for all of them.

The table of laws. ``curve`` holds the points, ``fit`` the fitter, ``ask`` the
questions (best law, data needed).
"""

from shoal.core.parts import PartTable

__all__ = ["LAWS"]

LAWS = PartTable(
    "law",
    {
        "power": "shoal.cost.scaling.power:PowerLaw",
        "power_floor": "shoal.cost.scaling.power_floor:PowerFloor",
        "three_regime": "shoal.cost.scaling.three_regime:ThreeRegime",
        "size": "shoal.cost.scaling.size:SizeLaw",
        "joint": "shoal.cost.scaling.joint:JointLaw",
    },
    about="The functional form of a learning curve. Chosen by `shoal explain scaling --law`.",
    protocol="shoal.cost.scaling.protocols:Law",
)
