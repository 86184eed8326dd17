"""Models that ``shoal bench decode`` takes beside drafters, and what it draws and keeps."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.claims.bench.decode import OWN, PLAIN, DecodeRow, advice
from shoal.core.errors import require
from shoal.core.sizes import human_bytes
from shoal.core.svg import Chart, Series
from shoal.core.tables import ShownAsTables, Table, table_of
from shoal.machine.fingerprint import fingerprint as machine
from shoal.plan.serving.decode_measured import MeasuredRow, MeasuredTable, keep


def check_own(name: str, directory: Path) -> None:
    """Check that a model is what it is said to be.

    Raises:
        ConfigError: it is something else, or there is no such way to decode.
    """
    from shoal.model import huggingface

    require(name in OWN, "--also", name, expected=f"one of {', '.join(OWN)}")
    config = huggingface.read_config(directory)
    text = "diffusion" if config.family == "mdlm" else config.architecture.name
    require(
        text == name,
        "--also",
        f"{name}={directory}",
        expected=f"a model of {name}; {directory} is {text or 'a plain model'}",
        hint="docs/how-to/choose-a-decoding.md says how to make one",
    )


def keep_rows(rows: Sequence[DecodeRow], target: Path, called: str, precision: str) -> Path:
    """Keep what was measured for plans to cite, and say where."""
    from shoal.model.drafters.files import fingerprint

    today = datetime.date.today().isoformat()
    same = ("method", "batch", "speedup", "low", "high", "tokens_per_step")
    return keep(
        MeasuredTable(
            target=fingerprint(target),
            models=tuple(dict.fromkeys((called, str(target.resolve())))),
            machine=machine(),
            precision=precision,
            rows=tuple(
                MeasuredRow(date=today, **{field: getattr(row, field) for field in same})
                for row in rows
                if row.method != PLAIN and row.agreement is not None
            ),
        )
    )


def drawn(rows: Sequence[DecodeRow]) -> Chart:
    """Speed over plain decoding: by requests where there are several sizes, else by tokens a step.

    On the line of free guesses no step costs more than plain decoding's.
    """
    sizes = sorted({row.batch for row in rows})
    if len(sizes) > 1:
        described = "Speed relative to plain decoding, by the number of concurrent requests."
        series = [
            Series(name, sizes, [r.speedup for r in rows if r.method == name], points=True)
            for name in dict.fromkeys(row.method for row in rows)
        ]
    else:
        most = max(row.tokens_per_step for row in rows)
        described = (
            "Speed relative to plain decoding, by tokens per step. The line is the limit if "
            "drafting and verification took no time."
        )
        series = [Series("free guesses", (1.0, most), (1.0, most))]
        series += [
            Series(row.method, (row.tokens_per_step,), (row.speedup,), line=False, points=True)
            for row in rows
        ]
    return Chart(
        title="Does speculative decoding pay off?",
        description=described,
        x_label="requests together" if len(sizes) > 1 else "tokens a step",
        y_label="tokens/s relative to plain decoding",
        log_x=len(sizes) > 1,
        series=series,
        cover_y=(0.0,),
    )


@dataclass(frozen=True, kw_only=True)
class DecodeComparison(ShownAsTables):
    """Ways to decode, measured in turn.

    Args:
        title: target, answers and precision.
        rows: a method with a number of requests at once.
        own: methods whose models were given.
        saved: where plans find the rows; None if they were not kept.
    """

    title: str
    rows: tuple[DecodeRow, ...]
    own: tuple[str, ...] = ()
    saved: Path | None = None

    def picture(self) -> str:
        """Speed over tokens a step or requests at once, as SVG."""
        return drawn(self.rows).render()

    def tables(self) -> Iterable[Table | str]:
        """All rows, what was left out, and which of them pays."""
        yield table_of(
            self.title,
            (
                "",
                "requests",
                "tokens/s",
                "over plain",
                "tokens a step",
                "guesses",
                "drafter",
                "agrees",
                "distinct",
            ),
            [
                (
                    row.method,
                    f"{row.batch}",
                    f"{row.tokens_per_s:.0f}",
                    f"{row.speedup:.2f} ({row.low:.2f} to {row.high:.2f})",
                    f"{row.tokens_per_step:.2f}",
                    f"{row.nodes_per_step:.1f}",
                    human_bytes(row.memory_bytes) if row.memory_bytes else "",
                    "own model" if row.agreement is None else f"{100 * row.agreement:.1f} %",
                    f"{row.distinct_4_grams:.2f}",
                )
                for row in self.rows
            ],
            " rrrrrrrr",
        )
        if loops := self.rows[0].loops:
            yield f"{loops} answers were left out because they repeat themselves"
        if missing := [name for name in OWN if name not in self.own]:
            yield (
                f"not measured: {', '.join(missing)}, which need a model of their own (--also "
                f"{missing[0]}=DIR), and hogwild, whose workers share a task (shoal claims run "
                "hogwild)"
            )
        yield advice(self.rows)
