"""How often should workers agree over this network: every step, once a round, or behind it?

Every part of kind ``sync`` prices the same job; a picture shows what the first worker and the
network do at the same time. Allocates nothing and needs no torch.

Source: Sun et al., CO2, 2024; Stich, Local SGD Converges Fast and Communicates Little, 2019.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from shoal.core.errors import PlanError, require
from shoal.core.parts import Choice, table
from shoal.core.svg import COLOURS
from shoal.cost.shapes import shape_of
from shoal.cost.training.step import Pricer
from shoal.ir import Machine, TrainJob, Work


class SyncOption(NamedTuple):
    """One way to agree, and what it takes.

    Args:
        tau: steps of a round; 1 where workers agree in every step.
        delayed: the all-reduce runs during the next round.
        step_s: s of a step, on average.
        waits_s: of these, in which a worker waits for others.
        sent_bytes: bytes that a rank sends per step, on average.
    """

    name: str
    tau: int
    delayed: bool
    step_s: float
    waits_s: float
    sent_bytes: float


class SyncOptions(NamedTuple):
    """All ways, and what they share.

    Args:
        alone_s: s that a worker computes in a step.
        average_s: s of an all-reduce of all parameters.
        options: the ways, fewest waits first.
    """

    alone_s: float
    average_s: float
    options: tuple[SyncOption, ...]


def ways(job: TrainJob, machine: Machine, *, tau: int | None = None) -> SyncOptions:
    """Price a job with every part of kind ``sync``.

    Args:
        job: with dp above 1; its own ``sync`` is not read.
        machine: where it runs.
        tau: steps of a round; the fewest that hide an average, if not given.

    Raises:
        PlanError: there is one worker alone.
    """
    require(
        job.parallel.dp > 1,
        "parallel.dp",
        job.parallel.dp,
        expected="2 or more workers, who have something to agree about",
        error=PlanError,
    )
    shape, pricer, parts = shape_of(job), Pricer(machine), table("sync")

    def work(choice: Choice) -> Work:
        return Work(job=job.model_copy(update={"sync": choice}), shape=shape)

    late = Choice(name="co2", options={"tau": tau or "auto"})
    steps = int(parts.build(late).steps(work(late), machine))
    # With rounds of one step nothing of an average is shared out or hidden.
    once = Choice(name="local_sgd", options={"tau": 1})
    average_s = parts.build(once).estimate(work(once), machine).step_s.value
    alone_s = max(1e-9, pricer.estimate(work(once)).step_s.value - average_s)
    results = []
    for name in parts:
        plain = name == "every_step"
        choice = Choice(name=name, options={} if plain else {"tau": steps})
        part = parts.build(choice)
        estimate = pricer.estimate(work(choice))
        results.append(
            SyncOption(
                name,
                1 if plain else steps,
                bool(getattr(part, "delayed", False)),
                estimate.step_s.value,
                max(0.0, estimate.step_s.value - alone_s),
                sum(estimate.wire_bytes.values()),
            )
        )
    return SyncOptions(alone_s, average_s, tuple(sorted(results, key=lambda way: way.waits_s)))


class _Box(NamedTuple):
    lane: int  # 0 computes, 1 the network
    begin: float
    end: float
    number: int


_WIDE, _TALL, _GAP, _LEFT, _TOP = 720, 16, 26, 96, 40


def rounds_picture(priced: SyncOptions) -> str:
    """An SVG: for each method two lanes with one time axis, computation and communication.

    It is as long as a round of the way that takes longest, and a step of rounds has their colour,
    as has their average.
    """
    tau = max(way.tau for way in priced.options)
    until = max(way.step_s for way in priced.options) * tau
    each = 2 * _TALL + _GAP
    height = _TOP + each * len(priced.options) + 16
    scale = _WIDE / until
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDE + 110} {height}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(_words(priced, until))}</title>",
        "<style>text{fill:#222}.w{fill:none;stroke:#888;stroke-dasharray:3 2}"
        "@media (prefers-color-scheme: dark){svg{background:#0f1219}text{fill:#eee}}</style>",
        f'<text x="{_LEFT}" y="16">{until:.3g} s: a worker computes (above), '
        "averages travel (below); dashes: it waits</text>",
    ]
    for place, way in enumerate(priced.options):
        top = _TOP + place * each
        out.append(f'<text x="4" y="{top + _TALL}">{escape(way.name)}</text>')
        done = 0
        for box in _timeline(way, priced, until):
            x, wide = _LEFT + box.begin * scale, (min(box.end, until) - box.begin) * scale
            waits = box.number < 0
            done += box.lane == 0 and not waits and box.end <= until * (1 + 1e-9)
            colour = COLOURS[box.number % len(COLOURS)]
            look = 'class="w"' if waits else f'fill="{colour}"'
            inset = 0.0 if box.lane or waits else min(0.6, wide / 6)
            out.append(
                f'<rect x="{x + inset:.1f}" y="{top + box.lane * (_TALL + 2)}" '
                f'width="{max(0.3, wide - 2 * inset):.1f}" height="{_TALL}" {look}/>'
            )
        out.append(f'<text x="{_LEFT + _WIDE + 6}" y="{top + _TALL}">{done} steps</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _timeline(way: SyncOption, priced: SyncOptions, until: float) -> Iterator[_Box]:
    """What happens when, in order; a box with a number below 0 is waiting."""
    now = free = 0.0
    came = [0.0]
    number = 0
    travel = way.waits_s if way.tau == 1 else priced.average_s
    while now < until:
        for _ in range(way.tau):
            if now >= until:
                return
            yield _Box(0, now, now + priced.alone_s, number)
            now += priced.alone_s
        begin = max(now, free)
        if begin >= until:
            return
        free = begin + travel
        if travel:
            yield _Box(1, begin, free, number)
        # A late worker waits for the average before this one.
        wanted = came[-1] if way.delayed else free
        came.append(free)
        if wanted > now:
            yield _Box(0, now, wanted, -1)
            now = wanted
        number += 1


def _words(priced: SyncOptions, until: float) -> str:
    names: Sequence[str] = [f"{way.name} {until / way.step_s:.0f} steps" for way in priced.options]
    return f"{until:.3g} s of training: {', '.join(names)}"
