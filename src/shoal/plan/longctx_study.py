"""``shoal explain longctx``: what does long context cost, at the peak of the hardware?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from shoal.core.counts import Count
from shoal.core.parts import part, table
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table, digits
from shoal.cost import shapes
from shoal.cost.longctx.peak import Convention, LongContext, LongModel, Peaks, lengths
from shoal.cost.longctx.picture import picture
from shoal.cost.longctx.reductions import ReductionChoice, choose, reaching, reduced
from shoal.cost.longctx.sessions import (
    Sessions,
    host_link_of,
    session_throughput,
    simulate_sessions,
)
from shoal.ir import Explanation, Machine, ModelShape, Progress, SchedulerLimits
from shoal.machine.described import load

# Tokens of a block of the simulated cache; contexts have so many that small ones take long.
_BLOCK = 256
# A simulated document is a list of its tokens: beyond this they would not fit into memory.
_MOST_SIMULATED = 2_000_000


@part
class LongctxStudy:
    """Show the cost of long context: concurrent users, prefill, decoding and swapping, by length.

    Times are at the peak of the hardware. Also shows from which length the cache is larger than the
    weights, and the cache reduction at which a long context costs as much as a short one.

    **Examples**

        shoal explain longctx CodeLlama-34b --first 4K --last 10M

        shoal explain longctx Llama-3-8B --compare a100,h100,h200 --picture longctx.svg

        shoal explain longctx Llama-3-8B --reduce window=4096 --reduce bits=4

        shoal explain longctx Llama-3-8B --machine H100 --users 8 --first 25K --last 100K

        shoal explain longctx Llama-3-70B --machine H200 --tp 4 -o json

    Args:
        model: name, directory or shape file of a model.
        compare: several machines beside each other instead of one, such as a100,h100,h200.
        first: shortest context.
        last: longest context.
        tp: devices that share every layer.
        precision: dtype of the weights.
        kv: dtype of the cache; that of the weights if not given.
        attention: FLOP of a prompt's attention, causal (exact), unmasked, or paper.
        link: byte/s to the host, each way; PCIe of the device if not given.
        compute_efficiency: share of the peak FLOP/s.
        memory_efficiency: share of the peak bandwidth.
        reduce: a way to make the cache smaller, such as window=4096.
        answer: tokens of an answer.
        long: context that should cost as much as ``short``.
        short: see ``long``.
        users: users who ask about documents, which gives sessions an hour.
        think: seconds that a user thinks.
        rounds: questions of a session.
    """

    subject: ClassVar = "model"
    machine: ClassVar = "A100"

    model: str
    compare: str | None = None
    first: Count = 4000
    last: Count = 10_000_000
    tp: int = 1
    precision: str = "bf16"
    kv: str | None = None
    attention: Convention = "causal"
    link: float | None = None
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    reduce: tuple[str, ...] = ()
    answer: int = 250
    long: Count = 1_000_000
    short: Count = 4000
    users: Annotated[int, Ge(0)] = 0
    think: float = 30.0
    rounds: int = 5

    def explain(self, machine: Machine, progress: Progress) -> Explanation:
        """The numbers of each machine by length, and which smaller caches would be enough."""
        machines = [machine]
        if self.compare:
            machines = [load(name.strip()) for name in self.compare.split(",")]
        shape = shapes.resolve(self.model)
        model = LongModel.of(shape, precision=self.precision, kv=self.kv)
        settings = [
            LongContext(
                model=model,
                device=Peaks.of(one, precision=self.precision, tp=self.tp, link=self.link),
                compute_efficiency=self.compute_efficiency,
                memory_efficiency=self.memory_efficiency,
                attention=self.attention,
            )
            for one in machines
        ]
        chosen, tokens = choose(self.reduce), lengths(self.first, self.last)
        blocks: list[Table | str] = []
        devices: dict[str, dict[str, Any]] = {}
        for setting in settings:
            record = self._record(setting, shape, chosen, tokens)
            devices[setting.device.name] = record
            blocks += [
                self._table(f"{shape.name} on {setting.device.name}", record),
                f"The cache reads as long as the weights at "
                f"{_tokens(round(setting.critical_length))} tokens; products bound a step from "
                f"{setting.compute_bound_tokens:,.0f} tokens on.\n",
            ]
        blocks.append(self._enough(settings[0], shape))
        return Explanation(
            blocks=tuple(blocks),
            data={
                "model": shape.name,
                "attention": self.attention,
                "reduce": [str(one) for one in chosen],
                "devices": devices,
            },
            picture=lambda: picture(settings, tokens, answer=self.answer),
        )

    def _record(
        self,
        setting: LongContext,
        shape: ModelShape,
        chosen: Sequence[ReductionChoice],
        lengths: Sequence[int],
    ) -> dict[str, Any]:
        """What it costs on one device, as JSON has it."""
        rows, sessions = [], {}
        for tokens in lengths:
            one = replace(setting, model=reduced(setting.model, chosen, shape, tokens))
            rows.append(
                {
                    "tokens": tokens,
                    "cache_bytes": one.model.cache_bytes(tokens),
                    "users": one.users(tokens),
                    "prefill_s": one.prefill_s(tokens),
                    "decode_s": one.decode_s(tokens),
                    "attention_share": one.attention_share(tokens),
                    "answer_s": self.answer * one.decode_s(tokens),
                    "switch_s": one.switch_s(tokens),
                }
            )
            if self.users and one.users(tokens) >= 1:
                sessions[str(tokens)] = self._sessions(one, tokens)
        return {
            "rows": rows,
            "critical_length": setting.critical_length,
            "compute_bound_tokens": setting.compute_bound_tokens,
            "as_cheap": {
                need.number: {"factor": need.factor, "of": need.of}
                for need in setting.needed(self.long, self.short)
            },
            "sessions_per_hour": sessions,
        }

    def _sessions(self, setting: LongContext, tokens: int) -> dict[str, float | None]:
        """Sessions an hour by the closed form and by simulation; None where it is too large."""
        sessions = Sessions(
            users=self.users,
            document=tokens,
            rounds=self.rounds,
            answer=self.answer,
            think_s=self.think,
        )
        closed = session_throughput(setting, sessions)
        held = int(setting.users(1) // _BLOCK) * _BLOCK
        if sessions.users * sessions.longest > _MOST_SIMULATED or held < sessions.longest:
            return {"closed_form": closed, "simulated": None}
        kv = table("kv").build({"name": "paged", "block_size": _BLOCK}).build(held)
        limits = SchedulerLimits(
            max_running=sessions.users, max_step_tokens=8192, max_position=sessions.longest + 1
        )
        room = sessions.users * (sessions.longest // _BLOCK + 1) * _BLOCK
        preemption = (
            table("preempt")
            .build("swap")
            .build(
                kv,
                limits,
                host_tokens=max(room, held),
                link=host_link_of(setting, _BLOCK),
            )
        )
        scheduler = table("scheduler").build("fcfs").build(kv, limits, preemption)
        simulated = simulate_sessions(setting, sessions, scheduler, block_size=_BLOCK)
        return {
            "closed_form": closed,
            "simulated": None if math.isnan(simulated) else simulated,
        }

    def _table(self, title: str, record: dict[str, Any]) -> Table:
        columns: tuple[str, ...] = ("context", "cache", "users", "prefill")
        columns += (f"{self.answer} tokens", "cache's share", "switch, one way")
        if self.users:
            columns += ("sessions/h", "simulated")
        rows = []
        for row in record["rows"]:
            cells = [
                _tokens(row["tokens"]),
                human_bytes(row["cache_bytes"]),
                f"{row['users']:,.2f}" if row["users"] < 10 else f"{row['users']:,.0f}",
                f"{digits(row['prefill_s'])} s",
                f"{digits(row['answer_s'])} s",
                f"{100 * row['attention_share']:.0f} %",
                f"{digits(row['switch_s'])} s",
            ]
            if self.users:
                there = record["sessions_per_hour"].get(str(row["tokens"]), {})
                hourly = (there.get("closed_form"), there.get("simulated"))
                cells += ["-" if one is None else f"{one:,.1f}" for one in hourly]
            rows.append(tuple(cells))
        return Table(title=title, columns=columns, rows=tuple(rows), right="rrrrrrrrr")

    def _enough(self, setting: LongContext, shape: ModelShape) -> str:
        """How much smaller a cache must be, and ways that make it so small."""
        needs = setting.needed(self.long, self.short)
        lines = [
            f"For {_tokens(self.long)} to be as cheap as {_tokens(self.short)}: "
            + ", ".join(f"{one.number} needs {one.of} x {digits(one.factor)}" for one in needs)
        ]
        ways = reaching(setting, shape, long=self.long, short=self.short)
        for left, some in ways[:5]:
            breaks = "; ".join(one.way.breaks for one in some)
            lines.append(f"  {' + '.join(map(str, some))}: cache x {digits(left)} ({breaks})")
        if not ways:
            lines.append("  no composition of the known ways is enough")
        return "\n".join(lines)


def _tokens(number: int) -> str:
    if number >= 1_000_000:
        return f"{number / 1e6:.4g}M"
    return f"{number / 1e3:.4g}K" if number >= 1000 else str(number)
