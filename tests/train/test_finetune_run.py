"""Fine-tuning as a training job: what is trained, what is saved, what comes out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from shoal.checkpoint.store import Store  # noqa: E402
from shoal.core.errors import CheckpointError, ConfigError, PlanError  # noqa: E402
from shoal.core.meter import read_events  # noqa: E402
from shoal.core.parts import Choice, table  # noqa: E402
from shoal.ir import TrainPlan  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.parscale import use  # noqa: E402
from shoal.plan.composition import check_composition  # noqa: E402
from shoal.train.peft import files  # noqa: E402
from shoal.train.peft.job import with_biases  # noqa: E402
from shoal.train.run import execute  # noqa: E402
from shoal.train.zoo import random  # noqa: E402

Make = Callable[..., TrainPlan]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory to start from."""
    place = tmp_path_factory.mktemp("base") / "model"
    huggingface.write(place, random("shoal-0.3m"))
    return place


def tuned(make_plan: Make, base: Path, **changes: Any) -> TrainPlan:
    plan = make_plan(
        **{
            "model": "shoal-0.3m",
            "steps": 6,
            "seq_len": 32,
            "finetune": {"name": "lora", "r": 4},
            "checkpoint": {"every": 3},
            "optimizer": {"name": "adamw", "lr": 1e-2},
            **changes,
        }
    )
    job = plan.job.model_copy(update={"model": str(base)})
    return plan.model_copy(update={"job": job})


def losses(run: Path) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in read_events(run / "events.jsonl") if e["kind"] == "step"}


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [{"name": "lora", "r": 4}, {"name": "adalora", "r": 4, "target": 2}], ids=str
)
def test_a_run_saves_the_adapter_alone_and_goes_on_bit_for_bit(
    method: dict[str, Any], make_plan: Make, base: Path, tmp_path: Path
) -> None:
    plan = tuned(make_plan, base, finetune=method)
    execute(plan, tmp_path / "whole")
    saved = Store(tmp_path / "whole" / "checkpoints").latest()
    kept = [n for n in saved.names() if n.startswith("model.")]
    assert kept and all(".parts." in n for n in kept), "the base is in no checkpoint"
    execute(plan, tmp_path / "again")
    execute(plan, tmp_path / "again", from_step=3)
    whole, again = losses(tmp_path / "whole"), losses(tmp_path / "again")
    assert whole == again

    x = torch.arange(24).view(2, 12)
    model = huggingface.read(base, torch.float32)
    before = model(x)
    files.load(model, tmp_path / "whole" / "adapter")
    merged = huggingface.read(tmp_path / "whole" / "export", torch.float32)
    torch.testing.assert_close(model(x), merged(x), atol=1e-5, rtol=1e-5)
    assert not torch.equal(merged(x), before)


@pytest.mark.multi
@pytest.mark.slow
def test_streams_are_trained_around_a_backbone_that_stands_still(
    make_plan: Make, base: Path, tmp_path: Path
) -> None:
    method = {"name": "streams", "num": 3, "prefix": 4}
    plan = tuned(make_plan, base, finetune=method, parallel={"dp": 2})
    execute(plan, tmp_path / "run")
    saved = Store(tmp_path / "run" / "checkpoints").latest()
    kept = [n for n in saved.names() if n.startswith("model.")]
    assert kept and all("aggregate" in n or "prefix" in n for n in kept)
    made = huggingface.read(tmp_path / "run" / "export", torch.float32)
    assert made.config.architecture.streams.num == 3
    before = huggingface.read(base, torch.float32)
    now = dict(made.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in before.named_parameters())
    x = torch.arange(24).view(2, 12)
    assert not torch.equal(made(x), before(x))
    use(made, 1)
    assert torch.equal(made(x), before(x))
    again = huggingface.read(base, torch.float32)
    files.load(again, tmp_path / "run" / "adapter")
    use(made, 3)
    assert torch.equal(again(x), made(x))


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_are_one(make_plan: Make, base: Path, tmp_path: Path) -> None:
    one, two = tuned(make_plan, base), tuned(make_plan, base, parallel={"dp": 2})
    execute(one, tmp_path / "one")
    execute(two, tmp_path / "two")
    first, second = (load_file(tmp_path / n / "adapter" / files.WEIGHTS) for n in ("one", "two"))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, atol=2e-4, rtol=2e-3)


@pytest.mark.multi
@pytest.mark.slow
def test_a_run_goes_on_with_its_own_base_and_method_only(
    make_plan: Make, base: Path, tmp_path: Path
) -> None:
    plan = tuned(make_plan, base, steps=3)
    execute(plan, tmp_path / "run")
    other = tmp_path / "other"
    huggingface.write(other, random("shoal-0.3m", seed=1))
    job = plan.job.model_copy(update={"model": str(other), "steps": 6})
    with pytest.raises(CheckpointError, match="base = "):
        execute(plan.model_copy(update={"job": job}), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("family", "targets", "becomes"),
    [
        ("llama", None, "llama"),
        ("llama", "*.v_proj", "llama"),
        ("qwen2", "*.o_proj", "llama"),
        ("qwen2", "*.q_proj", "qwen2"),
        ("qwen3", "*.self_attn.*", "qwen3"),
        ("qwen3", None, None),
        ("parallel", "*.mlp.*", "parallel"),
    ],
)
def test_biases_go_into_a_directory_that_has_room_for_them(
    family: str, targets: str | None, becomes: str | None, tmp_path: Path
) -> None:
    more = {"qwen2": {"attention_bias": True}, "qwen3": {"qk_norm": True}}
    config = ModelConfig(
        vocab_size=32, hidden=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
        ffn_hidden=48, max_position=64, family=family, **more.get(family, {})
    )  # fmt: skip
    model = random(config)
    handle = table("peft").build({"name": "bitfit"}).inject(model, targets)
    with torch.no_grad():
        for place, value in enumerate(handle.trainable().values()):
            value.fill_(0.1 + 0.01 * place)
    x = torch.arange(24).view(2, 12)
    learned = model(x)
    merged = with_biases(handle.keep_merged())
    if becomes is None:
        assert merged is None
        return
    huggingface.write(tmp_path / "whole", merged)
    again = huggingface.read(tmp_path / "whole", torch.float32)
    assert again.config.family == becomes
    torch.testing.assert_close(again(x), learned, atol=1e-5, rtol=1e-5)


@pytest.mark.multi
@pytest.mark.slow
def test_what_no_directory_holds_stays_beside_the_base(
    make_plan: Make, base: Path, tmp_path: Path
) -> None:
    execute(tuned(make_plan, base, finetune="bitfit"), tmp_path / "run")
    assert (tmp_path / "run" / "adapter" / files.WEIGHTS).is_file()
    assert not (tmp_path / "run" / "export").exists()


def test_what_does_not_go_together_is_refused(make_plan: Make, base: Path) -> None:
    for changes in ({"parallel": {"tp": 2}}, {"parallel": {"pp": 2}}, {"compile": True},
                    {"shard": "zero2", "parallel": {"dp": 2}}, {"replan": {"enabled": True}},
                    {"checkpoint": {"dump": "deepspeed"}},
                    {"offload": {"name": "zero_infinity", "device_budget": "64MiB"}}):  # fmt: skip
        with pytest.raises(PlanError, match=r"finetune(:|( =)? lora).*fine_tunes excludes"):
            check_composition(tuned(make_plan, base, **changes).job)
    documents = {"finetune": "mezo", "packing": "document"}
    with pytest.raises(PlanError, match=r"packing = document: expected stream .*finetune mezo"):
        check_composition(tuned(make_plan, base, **documents).job)
    for name in ("ladder", "offsite"):
        with pytest.raises(PlanError, match=f"recompute = full: .* none with finetune {name}"):
            check_composition(tuned(make_plan, base, finetune=name, recompute="full").job)
    one, two = (tuned(make_plan, base, parallel={"dp": dp}).job for dp in (1, 2))
    for lies in ("divided", "shared"):
        with pytest.raises(PlanError, match=f"base = {lies} without finetune"):
            check_composition(two.model_copy(update={"finetune": None, "base": lies}))
    with pytest.raises(PlanError, match=r"base = divided with parallel\.dp = 1"):
        check_composition(one.model_copy(update={"base": "divided"}))
    check_composition(two.model_copy(update={"base": "divided"}))
    for name in ("qlora", "offsite", "mezo", "dora", "pafi"):
        divided = {"base": "divided", "finetune": Choice(name=name)}
        with pytest.raises(PlanError, match=f"finetune = {name}: .* base divided.*divides_base"):
            check_composition(two.model_copy(update=divided))
    with pytest.raises(ConfigError, match=r"lora\.r = 0"):
        make_plan(finetune={"name": "lora", "r": 0})
