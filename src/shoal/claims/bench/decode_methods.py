"""Models that ``shoal bench decode`` takes beside drafters, and what it draws and keeps."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from shoal.claims.bench.decode import OWN, PLAIN, DecodeRow
from shoal.core.errors import require
from shoal.core.svg import Chart, Series
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
