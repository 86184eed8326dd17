"""A rank of a training run in which something is broken, for claim [81] MegaScale.

``python -m shoal.claims.experiments.megascale_worker RUN_DIR`` is the ordinary worker. Where the
variable SHOAL_BROKEN of this place says so, something below it is broken first: the loader, a
collective, the speed of the processor, or its arithmetic. Nothing else is informed of it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.core.janitor import leave

if TYPE_CHECKING:
    from shoal.train.batches import BatchSource
    from shoal.train.loop import RankTrainer

_FOR_EVER_S = 1e6


def break_here(kind: str, step: int) -> None:
    """Break this process from global ``step`` on.

    A stall: no more rows; a hang: an all-reduce never begins; slow: passes take twice as long;
    corrupt: wrong products.
    """
    import torch

    from shoal.parallel.comm.collectives import TorchComm
    from shoal.parallel.engine import ParallelEngine
    from shoal.train import batches, loop

    now = -1

    def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Call ``around(whole, *arguments)`` in the place of a function."""
        whole = getattr(owner, name)
        setattr(owner, name, lambda *args, **options: around(whole, *args, **options))

    def counted(whole: Any, trainer: RankTrainer, number: int, **options: Any) -> Any:
        nonlocal now
        now = number
        return whole(trainer, number, **options)

    def stalled(whole: Any, source: BatchSource, number: int) -> Any:
        if number >= step:
            time.sleep(_FOR_EVER_S)
        return whole(source, number)

    def hanging(whole: Any, *arguments: Any, **options: Any) -> Any:
        if now >= step:
            time.sleep(_FOR_EVER_S)
        return whole(*arguments, **options)

    def slow(whole: Any, *arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = whole(*arguments, **options)
        if now >= step:
            time.sleep(time.perf_counter() - begin)
        return result

    def wrong(whole: Any, *arguments: Any, **options: Any) -> Any:
        out = whole(*arguments, **options)
        if now >= step:
            out = out.clone()
            out.view(-1)[0] += 0.5
        return out

    wrap(loop.RankTrainer, "step", counted)
    places = {
        "stall": (batches.BatchSource, "read", stalled),
        "hang": (TorchComm, "all_reduce", hanging),
        "slow": (ParallelEngine, "backward", slow),
        "corrupt": (torch.nn.functional, "linear", wrong),
    }
    wrap(*places[kind])


def main() -> int:
    """Break what is to be broken, and train."""
    from shoal.train import worker

    value = os.environ.get("SHOAL_BROKEN")
    if value:
        break_here(**json.loads(value))
    return worker.main()


if __name__ == "__main__":
    leave(main())
