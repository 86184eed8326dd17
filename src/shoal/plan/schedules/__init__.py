"""schedules: the order of a pipeline's passes, one way a file."""

from shoal.core.parts import PartTable

__all__ = ["SCHEDULES"]

SCHEDULES = PartTable(
    "schedule",
    {
        "gpipe": "shoal.plan.schedules.gpipe:GPipe",
        "1f1b": "shoal.plan.schedules.one_f_one_b:OneFOneB",
        "interleaved": "shoal.plan.schedules.interleaved:InterleavedSchedule",
        "zb_h1": "shoal.plan.schedules.zb_h1:ZeroBubbleH1",
        "zbv": "shoal.plan.schedules.zbv:ZeroBubbleV",
        "vhalf": "shoal.plan.schedules.vhalf:VHalf",
        "vmin": "shoal.plan.schedules.vmin:VMin",
        "skippipe": "shoal.plan.schedules.skippipe:SkipPipe",
    },
    about=(
        "The order of the passes of a pipeline. Chosen by the key `parallel.schedule` "
        "of a job; drawn by `shoal explain schedule`."
    ),
    protocol="shoal.ir.schedule:SchedulePart",
)
