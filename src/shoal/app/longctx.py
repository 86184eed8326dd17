"""What ``shoal plan longctx`` asks of the calculator, and how the answer is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from shoal.cost.longctx import LongContext
    from shoal.cost.longctx_reductions import Chosen
    from shoal.cost.longctx_sessions import Sessions
    from shoal.ir import ModelShape

__all__ = ["Question", "answer", "show"]

# Tokens of a block of the simulated cache; contexts have so many that small ones take long.
_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    Args:
        model: name, directory or shape file.
        machines: names or files.
        first: shortest context.
        last: longest context.
        tp: devices that share every layer.
        precision: dtype of the weights.
        kv: dtype of the cache; that of the weights if not given.
        attention: how attention's FLOP are counted.
        link: B/s to the host; PCIe of the device if not given.
        efficiency: shares of peak FLOP/s and of peak bandwidth.
        reduce: ways that make the cache smaller.
        output: tokens of an answer.
        long: a context that shall be as cheap as ``short``.
        short: the context that it is compared with.
        users: of sessions; 0 for none.
        think_s: s that a user thinks.
        rounds: questions of a session.
    """

    model: str
    machines: Sequence[str]
    first: int = 4000
    last: int = 10_000_000
    tp: int = 1
    precision: str = "bf16"
    kv: str | None = None
    attention: str = "causal"
    link: float | None = None
    efficiency: tuple[float, float] = (1.0, 1.0)
    reduce: Sequence[str] = ()
    output: int = 250
    long: int = 1_000_000
    short: int = 4000
    users: int = 0
    think_s: float = 30.0
    rounds: int = 5


@dataclass(slots=True)
class Answer:
    """What was found, by device.

    Args:
        settings: the model on each device, with its whole cache.
        shape: of the model.
        chosen: ways that make the cache smaller.
        tokens: context lengths.
        rows: device -> one row of numbers a length.
        sessions: device -> context -> (closed form, simulated) sessions an hour.
    """

    settings: list[LongContext]
    shape: ModelShape
    chosen: tuple[Chosen, ...]
    tokens: tuple[int, ...]
    rows: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    sessions: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)

    def at(self, setting: LongContext, tokens: int) -> LongContext:
        """The setting with the cache that is left at this length."""
        from shoal.cost.longctx_reductions import reduced

        model = reduced(setting.model, self.chosen, self.shape, tokens)
        return replace(setting, model=model)


def answer(asked: Question) -> Answer:
    """Compute it.

    Raises:
        ShoalError: something that is asked cannot be.
    """
    from shoal.cost import shapes
    from shoal.cost.longctx import ATTENTION, LongContext, LongModel, Peaks, lengths
    from shoal.cost.longctx_reductions import choose
    from shoal.machine.described import load

    if asked.attention not in ATTENTION:
        raise ConfigError(
            f"attention = {asked.attention!r}: expected one of {', '.join(ATTENTION)}"
        )
    shape = shapes.resolve(asked.model)
    model = LongModel.of(shape, precision=asked.precision, kv=asked.kv)
    settings = [
        LongContext(
            model=model,
            device=Peaks.of(load(name), precision=asked.precision, tp=asked.tp, link=asked.link),
            compute_efficiency=asked.efficiency[0],
            memory_efficiency=asked.efficiency[1],
            attention=asked.attention,  # type: ignore[arg-type]
        )
        for name in asked.machines
    ]
    found = Answer(settings, shape, choose(asked.reduce), lengths(asked.first, asked.last))
    for setting in settings:
        rows = found.rows[setting.device.name] = []
        for tokens in found.tokens:
            one = found.at(setting, tokens)
            rows.append(
                {
                    "tokens": tokens,
                    "cache_bytes": one.model.cache_bytes(tokens),
                    "users": one.users(tokens),
                    "prefill_s": one.prefill_s(tokens),
                    "decode_s": one.decode_s(tokens),
                    "attention_share": one.attention_share(tokens),
                    "answer_s": asked.output * one.decode_s(tokens),
                    "switch_s": one.switch_s(tokens),
                }
            )
            if asked.users and one.users(tokens) >= 1:
                per_device = found.sessions.setdefault(setting.device.name, {})
                per_device[tokens] = _sessions(one, _who(asked, tokens))
    return found


def _who(asked: Question, tokens: int) -> Sessions:
    from shoal.cost.longctx_sessions import Sessions

    return Sessions(
        users=asked.users,
        document=tokens,
        rounds=asked.rounds,
        answer=asked.output,
        think_s=asked.think_s,
    )


# A simulated document is a list of its tokens: beyond this they would not fit into memory.
_MOST_SIMULATED = 2_000_000


def _sessions(setting: LongContext, sessions: Sessions) -> tuple[float, float]:
    """Sessions an hour by the closed form and by simulation; no number where it is too large."""
    from shoal.core.parts import table
    from shoal.cost.longctx_sessions import host_link_of, session_throughput, simulate_sessions
    from shoal.ir import Limits

    closed = session_throughput(setting, sessions)
    held = int(setting.users(1) // _BLOCK) * _BLOCK
    if sessions.users * sessions.longest > _MOST_SIMULATED or held < sessions.longest:
        return closed, float("nan")
    kv = table("kv").build({"name": "paged", "block_size": _BLOCK}).build(held)
    limits = Limits(
        max_running=sessions.users, max_step_tokens=8192, max_position=sessions.longest + 1
    )
    link = host_link_of(setting, _BLOCK)
    swap = table("preempt").build("swap")
    room = sessions.users * (sessions.longest // _BLOCK + 1) * _BLOCK
    preemption = swap.build(kv, limits, host_tokens=max(room, held), link=link)
    scheduler = table("scheduler").build("fcfs").build(kv, limits, preemption)
    return closed, simulate_sessions(setting, sessions, scheduler, block_size=_BLOCK)


def summary(asked: Question, found: Answer) -> dict[str, Any]:
    """The answer for other programs."""
    import math

    return {
        "model": found.shape.name,
        "attention": asked.attention,
        "reduce": [str(one) for one in found.chosen],
        "devices": {
            one.device.name: {
                "rows": found.rows[one.device.name],
                "critical_length": one.critical_length,
                "compute_bound_tokens": one.compute_bound_tokens,
                "as_cheap": {
                    need.number: {"factor": need.factor, "of": need.of}
                    for need in one.needed(asked.long, asked.short)
                },
                "sessions_per_hour": {
                    str(tokens): {
                        "closed_form": closed,
                        "simulated": None if math.isnan(simulated) else simulated,
                    }
                    for tokens, (closed, simulated) in found.sessions.get(
                        one.device.name, {}
                    ).items()
                },
            }
            for one in found.settings
        },
    }


def show(asked: Question, found: Answer) -> None:
    """Print tables."""
    from shoal.app.show import console, table
    from shoal.core.sizes import human_bytes
    from shoal.cost.longctx_reductions import reaching

    out = console()
    for setting in found.settings:
        name = setting.device.name
        per_hour = found.sessions.get(name, {})
        columns = [
            "context",
            "cache",
            "users",
            "prefill",
            f"{asked.output} tokens",
            "cache's share",
        ]
        columns += ["switch, one way"]
        if asked.users:
            columns += ["sessions/h", "simulated"]
        rows = []
        for row in found.rows[name]:
            tokens = int(row["tokens"])
            cells = [
                _tokens(tokens),
                human_bytes(row["cache_bytes"]),
                f"{row['users']:,.2f}" if row["users"] < 10 else f"{row['users']:,.0f}",
                f"{row['prefill_s']:,.3g} s",
                f"{row['answer_s']:,.3g} s",
                f"{100 * row['attention_share']:.0f} %",
                f"{row['switch_s']:,.3g} s",
            ]
            if asked.users:
                closed, simulated = per_hour.get(tokens, (float("nan"),) * 2)
                cells += [f"{one:,.1f}" if one == one else "-" for one in (closed, simulated)]
            rows.append(cells)
        table(f"{found.shape.name} on {name}", columns, rows, numeric="rrrrrrrrr")
        out.print(
            f"The cache reads as long as the weights at {_tokens(round(setting.critical_length))} "
            f"tokens; products bound a step from {setting.compute_bound_tokens:,.0f} tokens on.\n"
        )
    first = found.settings[0]
    needs = first.needed(asked.long, asked.short)
    out.print(
        f"For {_tokens(asked.long)} to be as cheap as {_tokens(asked.short)}: "
        + ", ".join(f"{one.number} needs {one.of} x {one.factor:.3g}" for one in needs)
    )
    ways = reaching(first, found.shape, long=asked.long, short=asked.short)
    for left, some in ways[:5]:
        breaks = "; ".join(one.way.breaks for one in some)
        out.print(f"  {' + '.join(map(str, some))}: cache x {left:.3g} ({breaks})")
    if not ways:
        out.print("  no composition of the known ways is enough")


def _tokens(number: int) -> str:
    if number >= 1_000_000:
        return f"{number / 1e6:.4g}M"
    return f"{number / 1e3:.4g}K" if number >= 1000 else str(number)
