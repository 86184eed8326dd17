"""Torch's interleaved 1F1B gives the same gradients on the same stages."""

from pathlib import Path

import pytest
from parallel_splits import config, job

from shoal.parallel.comm.processes import run_processes

RANKS = Path(__file__).with_name("ranks_torch_pipeline.py")


@pytest.mark.multi
@pytest.mark.slow
def test_torch_interleaved_gives_the_same_gradients() -> None:
    split = job(
        {"pp": 2, "vpp": 2, "schedule": "interleaved"}, global_batch=4, microbatch=1, seq_len=8
    )
    model = config()
    processes = run_processes(
        f"{RANKS}:gradients",
        2,
        {"job": split.model_dump(mode="json"), "config": model.model_dump(mode="json")},
    )
    names = {name for rank in processes for name in rank}
    assert len([name for name in names if name.endswith("qkv_proj.weight")]) == model.num_layers
    for rank in processes:
        for name, (largest, apart) in rank.items():
            assert largest > 0, name
            assert apart <= 1e-12 * largest, name
