"""What a search for goodput reports: settings, what each serves, and whether a plan still holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.core.config import Value
from shoal.core.errors import require
from shoal.core.parts import Choice
from shoal.core.svg import Chart, Series
from shoal.core.tables import Table, table_of
from shoal.cost.workloads.describe import describe
from shoal.ir import Arrival, Machine, Phase, ServeJob
from shoal.plan.serving.goodput import Slo


class DisaggSetting(Value):
    """A way to use devices.

    Args:
        scheduler: of engines that do both phases; None where each phase has its own.
        both: their instances.
        prefill: instances for prompts.
        decode: instances that generate.
    """

    scheduler: Choice | None = None
    both: Phase | None = None
    prefill: Phase | None = None
    decode: Phase | None = None

    @property
    def devices(self) -> int:
        """Devices of all instances."""
        return sum(one.devices for one in (self.both, self.prefill, self.decode) if one)

    def __str__(self) -> str:
        if self.both is not None:
            return f"{self.scheduler} {_split(self.both)}"
        assert self.prefill is not None
        assert self.decode is not None
        return f"prefill {_split(self.prefill)}, decode {_split(self.decode)}"


def _split(phase: Phase) -> str:
    shared = "".join(f" {name}{n}" for name, n in (("tp", phase.tp), ("pp", phase.pp)) if n > 1)
    return f"{phase.count}x{shared}".replace("x ", " x ")


class SettingResult(Value):
    """A setting, and what it serves.

    Args:
        setting: the setting, in the numbers that fill the devices.
        goodput: requests per second that all devices serve well enough.
        per_device: the same for one of the devices there are, used or not.
        curve: (rate per device, share of requests that meet both targets), for the best of a
            kind.
    """

    setting: DisaggSetting
    goodput: float
    per_device: float
    curve: tuple[tuple[float, float], ...] = ()


class GoodputReport(Value):
    """What serves a workload best under targets.

    Args:
        job: the job with the best setting.
        devices: how many there are.
        tried: settings, best first.
        workload: numbers of the requests, as in ``describe``.
        wanted: requests per second that shall be served; None if not stated.
        why: what the choice is, in a sentence.
        notes: what a reader should know.
    """

    job: ServeJob
    machine: Machine
    devices: int
    slo: Slo
    tried: tuple[SettingResult, ...]
    workload: dict[str, float] = {}
    wanted: float | None = None
    why: str = ""
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> SettingResult:
        """The one to take."""
        return self.tried[0]

    def best_of(self, *, apart: bool) -> SettingResult | None:
        """The best with, or without, instances for each phase."""
        return next((t for t in self.tried if (t.setting.both is None) == apart), None)

    def tables(self) -> Iterator[Table | str]:
        """The settings, best first, and how many requests each serves within the targets."""
        rows = [
            (str(one.setting), f"{one.goodput:.3g}", f"{one.per_device:.3g}", one.setting.devices)
            for one in self.tried
        ]
        slo = self.slo
        yield table_of(
            f"settings of {self.devices} devices, best first; {slo.share:.0%} of the requests "
            f"within ttft {slo.ttft:g} s and tpot {slo.tpot:g} s",
            ("setting", "requests/s", "a device", "devices used"),
            rows,
            right=" rrr",
        )
        for one in self.tried:
            if one.curve:
                points = [(f"{rate:.3g}", f"{share:.0%}") for rate, share in one.curve]
                yield table_of(
                    f"within both targets: {one.setting}", ("a device", "share"), points, right="rr"
                )
        yield self.why
        for note in self.notes:
            yield f"note: {note}"

    def picture(self) -> str:
        """Attainment over rate as SVG: the best of each kind, and the share that is wanted."""
        return self.chart().render()

    def chart(self, *more: Series, width: int = 640, height: int = 360) -> Chart:
        """The same before it is drawn.

        Args:
            *more: further lines or points, such as what was measured.
            width: of the picture, in px.
            height: of the picture, in px.
        """
        drawn = [one for one in (self.best_of(apart=a) for a in (True, False)) if one]
        rates = [rate for one in drawn for rate, _ in one.curve]
        series = [
            Series(
                str(one.setting),
                [rate for rate, _ in one.curve],
                [share for _, share in one.curve],
                points=True,
            )
            for one in drawn
        ]
        ends = (min(rates), max(rates))
        series.append(Series("wanted", ends, (self.slo.share,) * 2, dashed=True))
        return Chart(
            title=f"{self.job.model} on {self.devices} x {self.machine.name}",
            x_label="requests per second and device",
            y_label=f"share within ttft {self.slo.ttft:g} s, tpot {self.slo.tpot:g} s",
            series=[*series, *more],
            width=width,
            height=height,
        )


def drifted(planned: GoodputReport, seen: Sequence[Arrival], *, by: float = 0.3) -> str:
    """How what arrives differs from what was planned for; empty if it does not.

    Args:
        planned: what was planned, with its workload's numbers.
        seen: what arrived lately.
        by: relative change of the rate (where one was wanted) or of a median length.
    """
    require(by > 0, "drift", by, expected="a fraction above 0")
    now = describe(seen)
    expected = {name: planned.workload.get(name, 0.0) for name in ("prompt_p50", "output_p50")}
    if planned.wanted:
        expected["rate"] = planned.wanted
    words = {"prompt_p50": "median prompt", "output_p50": "median output", "rate": "rate"}
    return "; ".join(
        f"{words[name]} {now[name]:.4g} instead of {value:.4g}"
        for name, value in expected.items()
        if value and now[name] and abs(now[name] / value - 1) > by
    )
