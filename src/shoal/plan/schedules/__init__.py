"""schedules: the order of a pipeline's passes, one way a file."""

from shoal.core.parts import PartTable

__all__ = ["SCHEDULES"]

SCHEDULES = PartTable(
    "schedule",
    {
        "gpipe": "shoal.plan.schedules.gpipe:GPipe",
        "1f1b": "shoal.plan.schedules.one_f_one_b:OneFOneB",
    },
)
