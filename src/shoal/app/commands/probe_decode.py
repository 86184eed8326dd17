"""``shoal probe decode``: what rows and guesses cost on this machine, as a table."""

from __future__ import annotations

from pathlib import Path

import typer


def measure(job: Path | None, out: Path | None, *, json: bool) -> None:
    """Measure a serving job that guesses, and keep what its steps cost.

    Args:
        job: in YAML, with ``speculative``.
        out: the table; ``costs.json`` if None.
        json: print the table too.

    Raises:
        ConfigError: no job, or one that does not guess.
    """
    from shoal.app.show import as_json, table
    from shoal.core.config import resolve
    from shoal.core.errors import ConfigError
    from shoal.ir import ServeJob
    from shoal.plan.trees.drafting import ProfitableDrafting, RowCosts

    if job is None:
        raise ConfigError("probe decode: give --job, the YAML of a serving job with speculative")
    read = resolve(ServeJob, file=job, flags={}, sets=[]).value
    if read.speculative is None:
        raise ConfigError(f"{job}: speculative is not set; set it to the drafter to measure")
    from shoal.serve.engine.build import engine_of, load_model

    engine = engine_of(read, load_model(read))[0]
    paying = engine.scheduler.drafting  # type: ignore[attr-defined]
    assert isinstance(paying, ProfitableDrafting)
    costs = paying.cost
    assert isinstance(costs, RowCosts)
    place = out or Path("costs.json")
    costs.write(place)
    typer.echo(f"saved {place}", err=json)
    if json:
        as_json({"rows": costs.rows, "seconds": costs.seconds_of, "draft_s": costs.draft_s})
        return
    rows = [
        (str(count), f"{1e3 * seconds:.3f} ms", f"{seconds / costs.seconds_of[0]:.2f}x")
        for count, seconds in zip(costs.rows, costs.seconds_of, strict=True)
    ]
    table("step time by rows", ("rows", "step", "over one row"), rows, numeric="rrr")
    typer.echo(
        f"guesses: {1e3 * costs.draft_s:.3f} ms a step and {1e3 * costs.draft_request_s:.3f} ms "
        "a request"
    )
