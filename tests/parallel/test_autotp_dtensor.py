"""The plan as torch's own styles: transformers' code on two real ranks equals one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from autotp_dtensor import torch_styles

from shoal.core.errors import PlanError
from shoal.parallel.autotp.auto import discover
from shoal.parallel.autotp.families import FAMILIES, example, from_config
from shoal.parallel.comm.processes import run_processes


def llama() -> Any:
    return from_config({"model_type": "llama", **FAMILIES["llama"]}, device="cpu").double()


def on_process(comm: Any) -> float:
    """Largest difference of logits, on one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    model = llama()
    inputs = example(model)
    with torch.no_grad():
        whole = model(**inputs).logits
        styles = torch_styles(discover(model, (), inputs, tp=comm.world).plan)
        mesh = init_device_mesh("cpu", (comm.world,))
        result = parallelize_module(model, mesh, styles)(**inputs).logits
    return float((result - whole).abs().max() / whole.abs().max())


@pytest.mark.slow
@pytest.mark.multi
def test_torch_runs_the_plan() -> None:
    pytest.importorskip("transformers")
    assert max(run_processes(f"{Path(__file__)}:on_process", 2, {})) < 1e-12


def test_fused_projections_are_refused() -> None:
    pytest.importorskip("transformers")
    model = from_config({"model_type": "gpt2", **FAMILIES["gpt2"]})
    plan = discover(model, (), example(model), tp=2).plan
    with pytest.raises(PlanError, match=r"h\.0\.attn\.c_attn: packed_colwise"):
        torch_styles(plan)
