"""Tensor and sequence parallelism against the unsplit model, in fp64, on thread ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import DataError, PlanError  # noqa: E402
from shoal.ir.job import Parallel  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.dropout import Dropout  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402
from shoal.parallel.block import _Experts  # noqa: E402
from shoal.parallel.linear import RowLinear, WeightGradients  # noqa: E402
from shoal.parallel.protocols import MicroBatch, Ranks  # noqa: E402
from shoal.parallel.slices import slices, take, whole_shapes  # noqa: E402
from shoal.parallel.stage import LocalModel, Stage  # noqa: E402
from shoal.parallel.thread_comm import run_ranks  # noqa: E402

BASE = {
    "vocab_size": 37,
    "hidden": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 8,
    "ffn_hidden": 24,
    "max_position": 64,
}
CONFIGS = {
    "llama": ModelConfig(**BASE, family="llama"),
    "bias": ModelConfig(**BASE, family="llama", output_bias=True, ffn_bias=True),
    "qwen2": ModelConfig(**BASE, family="qwen2", attention_bias=True),
    "qwen3": ModelConfig(**BASE, family="qwen3", qk_norm=True),
    "mixtral": ModelConfig(**BASE, family="mixtral", num_experts=4, top_k=2),
}
STEP, ROW = 3, 5


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_model(config, dtype=torch.float64):
    source = torch.Generator().manual_seed(1)
    model = Transformer(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source, dtype=dtype) * 0.3)
            if name.endswith("norm.weight"):
                parameter.add_(1)
    return model


def batch(config, rows=2, length=8, documents=False):
    source = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, config.vocab_size, (rows, length), generator=source)
    targets = torch.randint(0, config.vocab_size, (rows, length), generator=source)
    targets[:, 2] = -100
    ids = None
    if documents:
        ids = (torch.arange(length) // 3).to(torch.int32).expand(rows, length).contiguous()
    return MicroBatch(tokens, targets, torch.arange(length), ids, ROW, STEP)


def ranks_of(comm):
    alone = comm.split([[r] for r in range(comm.world)])
    return Ranks(world=comm, tp=comm, cp=alone, pp=alone, data=alone, model=comm)


def reference(model, mb, dropout=None):
    at = None if dropout is None else dropout.at(mb.step, mb.row)
    loss = model.loss_sum(mb.tokens, mb.targets, documents_BT=mb.documents, dropout=at)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def gathered(config, parallel, results):
    """Whole gradients out of every rank's; what is partial is summed over the ranks."""
    found = {}
    every = [slices(config, parallel, rank) for rank in range(parallel.tp)]
    for name, shape in whole_shapes(config).items():
        whole = torch.zeros(shape, dtype=results[0][1][name].dtype)
        if every[0][name].replicated:
            grads = [result[1][name] for result in results]
            if every[0][name].partial:
                whole = sum(grads)
            else:
                assert all(torch.equal(g, grads[0]) for g in grads), name
                whole = grads[0]
        else:
            for part, (_, grads) in zip(every, results, strict=True):
                for local, box in part[name].placed():
                    at = tuple(slice(o, e) for o, e in zip(box.offset, box.stop, strict=True))
                    here = tuple(slice(o, e) for o, e in zip(local.offset, local.stop, strict=True))
                    whole[at] = grads[name][here]
        found[name] = whole
    return found


def run(config, parallel, mb, values, dropout=None, recompute=False, defer=False, change=None):
    def rank(comm):
        stage = Stage(
            config,
            range(config.num_layers),
            first=True,
            last=True,
            parallel=parallel,
            ranks=ranks_of(comm),
            dropout=dropout,
        )
        stage.load(lambda name: values[name], dtype=values["norm.weight"].dtype)
        if change is not None:
            change(stage)
        loss = stage(None, mb, recompute=recompute)
        if defer:
            waiting = WeightGradients()
            with waiting:
                loss.backward()
            assert stage.get_parameter("blocks.0.attention.qkv_proj.weight").grad is None
            waiting.run()
        else:
            loss.backward()
        return loss.item(), {name: p.grad for name, p in stage.named_parameters()}

    return run_ranks(parallel.tp, rank)


def worst(found, expected):
    return max(
        ((found[name] - grad).norm() / grad.norm().clamp_min(1e-12)).item()
        for name, grad in expected.items()
    )


@pytest.mark.parametrize("vocab", ["tp", "none"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sp"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_equals_one_rank(family, tp, sp, tied, vocab):
    config = CONFIGS[family].model_copy(update={"tied": tied})
    model = random_model(config)
    mb = batch(config, documents=tied)
    dropout = Dropout(0.2, 7)
    loss, expected = reference(model, mb, dropout)
    values = {name: p.detach() for name, p in model.named_parameters()}
    parallel = Parallel(tp=tp, sp=sp, vocab=vocab)
    results = run(config, parallel, mb, values, dropout, recompute=sp)
    assert [result[0] for result in results] == pytest.approx([loss] * tp, rel=1e-11)
    assert worst(gathered(config, parallel, results), expected) < 1e-10
