"""A rank of a training run in which something is broken, for claim [81] MegaScale.

``python -m shoal.claims.experiments.megascale_worker RUN_DIR`` is the ordinary worker. Where the
variable SHOAL_BROKEN of this place says so, something below it is broken first: the loader, a
collective, the speed of the processor, or its arithmetic. Nothing else is informed of it.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from shoal.core.janitor import leave

__all__ = ["break_here", "main"]

_FOR_EVER_S = 1e6


def break_here(kind: str, step: int) -> None:
    """Break this process from ``step`` on.

    Args:
        kind: stall (the loader gives no more rows), hang (an all-reduce never begins), slow
            (forward and backward passes take twice as long), corrupt (products are wrong).
        step: global step.
    """
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.train.loop import RankTrainer

    now = {"step": -1}
    whole = RankTrainer.step

    def counted(self: RankTrainer, number: int, **options: Any) -> Any:
        now["step"] = number
        return whole(self, number, **options)

    RankTrainer.step = counted  # type: ignore[method-assign]
    if kind == "stall":
        from shoal.train.batches import BatchSource

        rows = BatchSource.read

        def stalled(self: BatchSource, number: int) -> Any:
            if number >= step:
                time.sleep(_FOR_EVER_S)
            return rows(self, number)

        BatchSource.read = stalled  # type: ignore[method-assign, assignment]
    elif kind == "hang":
        all_reduce = TorchComm.all_reduce

        def hanging(self: TorchComm, *arguments: Any, **options: Any) -> Any:
            if now["step"] >= step:
                time.sleep(_FOR_EVER_S)
            return all_reduce(self, *arguments, **options)

        TorchComm.all_reduce = hanging  # type: ignore[method-assign]
    elif kind == "slow":
        from shoal.parallel.engine import ParallelEngine

        backward = ParallelEngine.backward

        def slow(self: ParallelEngine, *arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = backward(self, *arguments, **options)
            if now["step"] >= step:
                time.sleep(time.perf_counter() - begin)
            return result

        ParallelEngine.backward = slow  # type: ignore[method-assign]
    elif kind == "corrupt":
        import torch

        linear = torch.nn.functional.linear

        def wrong(*arguments: Any, **options: Any) -> Any:
            out = linear(*arguments, **options)
            if now["step"] >= step:
                out = out.clone()
                out.view(-1)[0] += 0.5
            return out

        torch.nn.functional.linear = wrong


def main() -> int:
    """Break what is to be broken, and train."""
    from shoal.train import worker

    value = os.environ.get("SHOAL_BROKEN")
    if value:
        break_here(**json.loads(value))
    return worker.main()


if __name__ == "__main__":
    leave(main())
