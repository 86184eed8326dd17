"""What functions cost that a cloud runs: a price for each call, and one for memory over time."""

from __future__ import annotations

import math
from typing import Annotated

from annotated_types import Ge, Gt

from shoal.core.config import Value


class FunctionPrices(Value):
    """Prices of functions; the defaults are those of AWS Lambda on x86 in us-east-1 (2025).

    Args:
        call_usd: of a call.
        gb_s_usd: of a GB of memory for a second.
        step_s: seconds that are billed are rounded up to these.
    """

    call_usd: Annotated[float, Ge(0)] = 0.2e-6
    gb_s_usd: Annotated[float, Ge(0)] = 16.6667e-6
    step_s: Annotated[float, Gt(0)] = 1e-3

    def billed_s(self, seconds: float) -> float:
        """Seconds of a call that are billed."""
        return math.ceil(seconds / self.step_s) * self.step_s

    def usd(self, calls: float, gb_s: float) -> float:
        """The price of calls that had so many GB for seconds."""
        return calls * self.call_usd + gb_s * self.gb_s_usd
