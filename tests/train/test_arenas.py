"""The memory of a fine-tuning run, told apart, and as it was predicted."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ModelError  # noqa: E402
from shoal.core.meter import read_events  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.cost.training.memory import ARENAS  # noqa: E402
from shoal.ir import TrainPlan, compared, predictions  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.train.peft.arenas import Arenas  # noqa: E402
from shoal.train.run import execute  # noqa: E402
from shoal.train.zoo import random  # noqa: E402


def test_every_tensor_has_its_arena() -> None:
    model = random("shoal-0.3m")
    base = sum(p.nbytes for p in model.parameters())
    handle = table("peft").build({"name": "lora", "r": 4}).inject(model)
    trained = list(handle.trainable().values())
    own = sum(p.nbytes for p in trained)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    arenas = Arenas(model, handle)
    inputs = torch.arange(64).view(2, 32)
    kept: dict[int, int] = {}
    standing = {p.untyped_storage()._cdata for p in model.parameters()}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in standing:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with arenas.passes(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model.loss_sum(inputs, inputs)
        torch.autograd.backward(loss)
    optimizer.step()
    state = {str(n): optimizer.state[p] for n, p in enumerate(trained)}
    result = arenas.bytes(state)
    assert tuple(result) == ARENAS
    assert result["base"] == base and result["adapter"] == own == result["gradients"]
    assert result["optimizer"] == 2 * own + 4 * len(trained)
    assert sum(kept.values()) <= result["activations"] < 2 * sum(kept.values())


def test_a_base_in_few_bits_leaves_no_other_behind() -> None:
    model = random("shoal-0.3m")
    blocks = sum(p.nbytes for p in model.blocks.parameters() if p.dim() == 2)
    whole = sum(p.nbytes for p in model.parameters())
    before = [weakref.ref(x) for x in model.blocks.modules() if isinstance(x, torch.nn.Linear)]
    handle = table("peft").build({"name": "qlora", "r": 4}).inject(model)
    handle.stay()
    result = Arenas(model, handle).bytes({})
    assert result["base"] == pytest.approx(whole - blocks * (1 - 4.13 / 32), rel=0.01)
    gc.collect()
    assert before and not [one for one in before if one() is not None]
    with pytest.raises(ModelError, match="the way back was let go"):
        handle.remove()


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora_fa", "qlora"])
def test_a_run_tells_what_was_predicted_and_measured(
    method: str, make_plan: Callable[..., TrainPlan], tmp_path: Path
) -> None:
    base = tmp_path / "model"
    huggingface.write(base, random("shoal-0.3m"))
    plan = make_plan(
        model="shoal-0.3m", steps=3, seq_len=64, microbatch=8, finetune=method, precision="fp32"
    )
    job = plan.job.model_copy(update={"model": str(base)})
    report = execute(plan.model_copy(update={"job": job}), tmp_path / "run")
    notes = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["kind"] == "arenas"]
    assert len(notes) == 1
    before = predictions(plan)
    for arena in ARENAS:
        key = f"{arena}_bytes"
        assert report.measured[key] == notes[0][arena]
        near = 0.01 if arena != "activations" else 0.5
        assert report.measured[key] == pytest.approx(before[key].value, rel=near), arena
        assert key in report.errors
    shown = {row[0].strip(): row for row in compared(report)}
    assert shown["the base's weights"][1] and shown["the base's weights"][3]
