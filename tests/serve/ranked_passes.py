"""What two processes do in a test: recorded passes of a draft by ranks, beside others."""

from __future__ import annotations

import numpy as np
from cpp_first import cpp_first

from shoal.kernel import dispatch


def passes(comm, *, path, groups):
    """The same with attention alone stale, and with feed-forward layers too."""
    dispatch._remembered = cpp_first()  # in this process, which ends with the test
    return [_passes(comm, path, tuple(groups), full) for full in (False, True)]


def _passes(comm, path, groups, full):
    """The farthest that scores of recorded passes are from those of others, and the recordings."""
    import torch

    from shoal.ir import ServeJob
    from shoal.serve.decode.captured import TreeRows
    from shoal.serve.decode.draft.ranked import part_of, ranked

    fields = {"model": path, "kv_tokens": 256, "threads": 1, "max_running": 2}
    fields["speculative"] = {"name": "draft_model", "path": path}
    job = ServeJob.model_validate(fields)
    part = part_of(path, job, 128, torch.bfloat16, comm.rank, comm.world)
    net = ranked(part, comm, 128, groups=groups, full=full)
    if net.recorded is None:
        return None
    zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    far = 0.0
    with torch.inference_mode():
        for place in range(8):
            row = TreeRows([place + 3], [2, 5], place, place, zero, one)
            result = net.rows([row]).float().clone()
            recorded, net.recorded = net.recorded, None
            far = max(far, (net.rows([row]).float() - result).abs().max().item())
            net.recorded = recorded
    tape = net.recorded.known.get((1, 1))
    played = tape is not None and tape.tape is not None
    return {"far": far, "played": played, "reasons": list(net.recorded.reasons.values())}
