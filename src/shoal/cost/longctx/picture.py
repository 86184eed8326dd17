"""Pictures of the four numbers of long context, over its length, for one device or several."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.svg import Chart, Series, stacked
from shoal.cost.longctx.peak import LongContext


def picture(settings: Sequence[LongContext], tokens: Sequence[int], *, answer: int = 250) -> str:
    """Four charts below each other, as SVG text."""
    names = [f"{one.model.name} on {one.device.name}" for one in settings]
    numbers = (
        ("Users that fit", "users", [[one.users(S) for S in tokens] for one in settings]),
        ("Reading the prompt", "s", [[one.prefill_s(S) for S in tokens] for one in settings]),
        (
            f"Writing {answer} tokens",
            "s",
            [[answer * one.decode_s(S) for S in tokens] for one in settings],
        ),
        (
            "Putting a user aside and back",
            "s",
            [[2 * one.switch_s(S) for S in tokens] for one in settings],
        ),
    )
    return stacked(
        [
            Chart(
                title=title,
                x_label="tokens of context",
                y_label=unit,
                series=[
                    Series(name, list(tokens), values)
                    for name, values in zip(names, found, strict=True)
                ],
                log_x=True,
                log_y=True,
                legend=title == numbers[0][0],
                height=260,
            )
            for title, unit, found in numbers
        ]
    )
