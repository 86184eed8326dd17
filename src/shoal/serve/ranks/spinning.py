"""How long a thread that waits for the others keeps its core busy. Imports no torch.

A step is some hundred short parallel sections. By default GNU OpenMP's threads spin for a
millisecond and more between them; when another process wants a core, they spin on while the
thread they wait for is not running, and a step takes tens of times as long. Not spinning at
all costs a fifth of the speed on a quiet machine. A few tens of microseconds cost nothing
and bound the damage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

# Turns of a loop; some 20 microseconds.
_SPINS = "20000"


def spin_briefly(environment: MutableMapping[str, str] | None = None) -> bool:
    """Limit the spinning of this process, or of one to be started with ``environment``.

    What the user has set is left alone. Returns whether it takes effect: the library reads
    it when torch is first imported.
    """
    own = environment is None
    target = os.environ if environment is None else environment
    if "GOMP_SPINCOUNT" in target or "OMP_WAIT_POLICY" in target:
        return False
    if own and "torch" in sys.modules:
        return False
    target["GOMP_SPINCOUNT"] = _SPINS
    return True
