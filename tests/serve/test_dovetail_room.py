"""What plans say that lies on a small device is what serving counts there."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.cost.shapes import resolve  # noqa: E402
from shoal.ir import ServeJob  # noqa: E402
from shoal.machine.described import load  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.drafters.fusion import FusionDrafter  # noqa: E402
from shoal.plan.serving.small_device import SmallDevice  # noqa: E402
from shoal.serve.decode.dovetail.part import DovetailSpeculative  # noqa: E402
from shoal.serve.decode.dovetail.small_device import placed  # noqa: E402
from shoal.train.zoo import random  # noqa: E402


@pytest.mark.parametrize("tied", [False, True])
def test_planned_bytes_are_those_that_are_counted(tied, tmp_path):
    config = ModelConfig(
        name="tiny", vocab_size=97, hidden=64, num_layers=3, num_heads=4, num_kv_heads=2,
        head_dim=16, ffn_hidden=96, max_position=256, tied=tied,
    )  # fmt: skip
    model = random(config, 0).requires_grad_(False)
    huggingface.write(tmp_path / "tiny", model)
    device = SmallDevice(
        machine=load("laptop"), shape=resolve(str(tmp_path / "tiny")), precision="fp32",
        places=208, depth=3, breadth=2,
    )  # fmt: skip
    job = ServeJob(model="tiny", kv_tokens=208, max_position=208, exact=True)
    state = FusionDrafter(config, 2).state_dict()
    option = device.option("2", 2, ((0.6, 0.2),))
    for layers in (0, 2):
        part = DovetailSpeculative(path="", depth=3, breadth=2, target_layers=layers)
        counted = placed(part, job, model, 2, state).nbytes
        assert counted == option.nbytes + layers * device.layer_bytes
