"""The target's first layers with Dovetail's drafter: the same tokens, counted bytes, fewer weights."""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))

from test_dovetail import engine, job_of, served  # noqa: E402, F401
from test_draft_model import known_costs  # noqa: E402, F401
from test_speculative import answers, prompts  # noqa: E402

from shoal.core.errors import ConfigError, ModelError, ServeError  # noqa: E402
from shoal.ir import Copy, Request, SamplingParams, ServeJob  # noqa: E402
from shoal.model.parameters import Parameters  # noqa: E402
from shoal.plan.trees.drafting import Always  # noqa: E402
from shoal.serve.attention import Context, PagedAttention  # noqa: E402
from shoal.serve.build import engine_of  # noqa: E402
from shoal.serve.cache import PagedCache  # noqa: E402
from shoal.serve.decode.dovetail_front import Front  # noqa: E402
from shoal.serve.decode.dovetail_layers import FirstLayers, LaterCache, LaterLayers  # noqa: E402
from shoal.serve.decode.dovetail_steps import Inside, Moved, Several, packed, unpacked  # noqa: E402
from shoal.serve.decode.dovetail_wire import HEAD_BYTES, Kind, layers_bytes  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_step_tokens": 24, "kv": {"name": "paged", "block_size": 4}},
        {"kv_tokens": 320, "max_position": 200},
        {"kv": {"name": "blockgroups", "init": 4}, "kv_tokens": 320, "max_position": 200},
    ],
)
def test_same_tokens_and_bytes_by_the_formula(fields, served, engine_for, serve_all):  # noqa: F811
    asked = prompts()
    known = answers(serve_all, engine_for(served[0]), asked)
    for overlap in (False, True):
        job = job_of(served, overlap=overlap, depth=3, breadth=3, nodes=7, target_layers=1)
        job = ServeJob.model_validate({**job.model_dump(), **fields})
        found = engine_of(job, served[0])[0]
        found.scheduler.drafting = Always(7)
        drafter = found.runner.drafter
        try:
            assert answers(serve_all, found, asked) == known
            assert drafter.link_bytes == drafter.expected_bytes
            stats = found.stats()
            assert stats["draft_trees_total"] > 50
            assert bool(stats["preemptions_total"]) == ("kv_tokens" in fields)
        finally:
            drafter.close()
