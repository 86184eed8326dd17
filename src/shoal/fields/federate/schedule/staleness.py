"""How much an update counts that started from an old version.

Source: Xie, Koyejo, Gupta, Asynchronous Federated Optimization, 2019, section 5.2.
"""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge

from shoal.core.parts import part


@part
class StalenessWeight:
    """A weight that falls with the versions by which an update is late.

    Args:
        form: ``polynomial``: (1 + s)^-a; ``hinge``: 1 / (a (s - b) + 1) where s > b, else 1;
            ``constant``: 1.
        a: how fast it falls.
        b: versions that cost nothing, with ``hinge``.
    """

    form: Literal["polynomial", "hinge", "constant"] = "polynomial"
    a: Annotated[float, Ge(0)] = 0.5
    b: Annotated[int, Ge(0)] = 4

    def __call__(self, stale: int) -> float:
        """The weight of an update that is so many versions late."""
        if self.form == "constant":
            return 1.0
        if self.form == "hinge":
            return 1.0 if stale <= self.b else 1.0 / (self.a * (stale - self.b) + 1.0)
        return float((1 + stale) ** -self.a)
