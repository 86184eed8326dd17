"""Arrivals in a few numbers: how many, how often, how long."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.ir import Arrival


def describe(arrivals: Sequence[Arrival]) -> dict[str, float]:
    """Number, rate, and quantiles of the lengths of ``arrivals``.

    Returns:
        ``requests``, ``span_s``, ``rate`` (requests per second; 0 if all come at once),
        ``sessions``, and ``prompt_p50``, ``prompt_p95``, ``prompt_max``, ``prompt_total`` and
        the same of ``output``, in tokens.
    """
    import numpy as np

    values: dict[str, float] = {"requests": len(arrivals)}
    span = arrivals[-1].at - arrivals[0].at if arrivals else 0.0
    values["span_s"] = span
    values["rate"] = (len(arrivals) - 1) / span if span > 0 else 0.0
    values["sessions"] = len({one.session for one in arrivals if one.session})
    for name, lengths in (
        ("prompt", [len(one.prompt) for one in arrivals] or [0]),
        ("output", [one.output_tokens for one in arrivals] or [0]),
    ):
        values[f"{name}_p50"] = float(np.percentile(lengths, 50))
        values[f"{name}_p95"] = float(np.percentile(lengths, 95))
        values[f"{name}_max"] = float(max(lengths))
        values[f"{name}_total"] = float(sum(lengths))
    return values


def sentence(arrivals: Sequence[Arrival], *, seed: int) -> str:
    """The same in a line for people, with the seed."""
    result = describe(arrivals)
    pace = f"{result['rate']:.3g} a second" if result["rate"] else "all at once"
    return (
        f"{len(arrivals)} requests, {pace}; prompt tokens: median {result['prompt_p50']:.0f}, "
        f"95 % {result['prompt_p95']:.0f}, longest {result['prompt_max']:.0f}; output tokens: "
        "median "
        f"{result['output_p50']:.0f}, 95 % {result['output_p95']:.0f}, longest "
        f"{result['output_max']:.0f}; seed {seed}"
    )
