"""Tensor and sequence parallelism against the unsplit model, in fp64, on thread ranks."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from shoal.claims.lab.thread_ranks import run_ranks  # noqa: E402
from shoal.core.errors import ConfigError, DataError, ModelError, PlanError  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.ir.job import Parallel  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.dropout import Dropout  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402
from shoal.parallel.pipeline.stage import LocalModel, Stage  # noqa: E402
from shoal.parallel.protocols import MicroBatch, Ranks  # noqa: E402
from shoal.parallel.tensor.linear import RowLinear, WeightGradients  # noqa: E402
from shoal.parallel.tensor.slices import slices, take, whole_shapes  # noqa: E402

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
    result = {}
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
        result[name] = whole
    return result


def run(
    config,
    parallel,
    mb,
    values,
    dropout=None,
    recompute=False,
    defer=False,
    change=None,
    autocast=False,
):
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
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
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


DROPOUT = Dropout(0.2, 7)


@functools.cache
def one_rank(family, tied):
    """A model, what it computes and its result, which every split of it is compared with."""
    config = CONFIGS[family].model_copy(update={"tied": tied})
    model, mb = random_model(config), batch(config, documents=tied)
    loss, expected = reference(model, mb, DROPOUT)
    return config, mb, {name: p.detach() for name, p in model.named_parameters()}, loss, expected


@pytest.mark.parametrize("vocab", ["tp", "none"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sp"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_equals_one_rank(family, tp, sp, tied, vocab):
    config, mb, values, loss, expected = one_rank(family, tied)
    parallel = Parallel(tp=tp, sp=sp, vocab=vocab)
    results = run(config, parallel, mb, values, DROPOUT, recompute=sp)
    assert [result[0] for result in results] == pytest.approx([loss] * tp, rel=1e-11)
    assert worst(gathered(config, parallel, results), expected) < 1e-10


def prepared(family, tied=False, dtype=torch.float64, **kw):
    config = CONFIGS[family].model_copy(update={"tied": tied})
    model = random_model(config, dtype)
    values = {name: p.detach() for name, p in model.named_parameters()}
    return config, model, values, batch(config, **kw)


@pytest.mark.parametrize("family", list(CONFIGS))
def test_one_rank_is_the_model_to_the_bit(family):
    config, model, values, mb = prepared(family, documents=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss_sum(mb.tokens, mb.targets, documents_BT=mb.documents)
    loss.backward()
    ((result, grads),) = run(config, Parallel(), mb, values, autocast=True)
    assert result == loss.item()
    assert all(torch.equal(grads[n], p.grad) for n, p in model.named_parameters())


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "parallel",
    [Parallel(), Parallel(tp=2), Parallel(tp=2, sp=True)],
    ids=["one", "tp", "tp-sp"],
)
@pytest.mark.parametrize("family", list(CONFIGS))
def test_weight_gradients_that_wait_are_the_same_bits(family, parallel, recompute):
    config, _, values, mb = prepared(family, dtype=torch.float32)
    for autocast in (False, True):
        now = run(config, parallel, mb, values, recompute=recompute, autocast=autocast)
        later = run(
            config, parallel, mb, values, recompute=recompute, autocast=autocast, defer=True
        )
        for (loss, grads), (other, others) in zip(now, later, strict=True):
            assert loss == other and grads.keys() == others.keys()
            assert all(torch.equal(grads[name], others[name]) for name in grads)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("vocab", ["tp", "none"])
def test_tokens_that_are_not_divisible_are_padded(tp, vocab):
    config, model, values, mb = prepared("bias", rows=1, length=7)
    dropout = Dropout(0.3, 7)
    loss, expected = reference(model, mb, dropout)
    parallel = Parallel(tp=tp, sp=True, vocab=vocab)
    results = run(config, parallel, mb, values, dropout)
    assert [result[0] for result in results] == pytest.approx([loss] * tp, rel=1e-11)
    assert worst(gathered(config, parallel, results), expected) < 1e-10


def test_bf16_stays_near_and_weights_stay_fp32():
    config, model, values, mb = prepared("qwen3", dtype=torch.float32)
    _, expected = reference(model, mb)
    parallel = Parallel(tp=2, sp=True)
    results = run(config, parallel, mb, values, autocast=True)
    result = gathered(config, parallel, results)
    assert all(grad.dtype == torch.float32 for grad in result.values())
    assert worst(result, expected) < 0.06


def bias_on_every_rank(stage):
    """The fault: every rank adds the bias to its share of the sum."""

    class Wrong(RowLinear):
        def forward(self, x, total=0):
            bias, self.bias = self.bias, None
            out = super().forward(x, total)
            self.bias = bias
            return out + self.comm.world * bias

    for block in stage.blocks.values():
        block.mlp.down_proj.__class__ = Wrong


def test_the_oracle_sees_a_bias_that_is_added_by_every_rank():
    config, model, values, mb = prepared("bias")
    loss, _ = reference(model, mb)
    results = run(config, Parallel(tp=2), mb, values, change=bias_on_every_rank)
    assert abs(results[0][0] - loss) > 1e-3


@pytest.mark.parametrize("sp", [False, True])
def test_the_oracle_sees_a_gradient_that_was_not_summed(sp):
    config, model, values, mb = prepared("qwen3")
    _, expected = reference(model, mb)
    parallel = Parallel(tp=2, sp=sp)
    results = run(config, parallel, mb, values)
    partial = {n for n, part in slices(config, parallel, 0).items() if part.partial}
    names = {n for n in partial if n.endswith(("q_norm.weight", "k_norm.weight"))}
    assert len(names) == 2 * config.num_layers and (sp or names == partial)
    for name in partial:
        assert worst({name: results[0][1][name]}, {name: expected[name]}) > 1e-3, name


@pytest.mark.parametrize("sp", [False, True])
def test_bytes_of_a_layer_are_those_of_the_paper(sp):
    config, _, values, mb = prepared("llama")
    parallel = Parallel(tp=4, sp=sp, vocab="none")
    counted = []

    def rank(comm):
        stage = Stage(
            config,
            range(1, 2),
            first=False,
            last=False,
            parallel=parallel,
            ranks=ranks_of(comm),
        )
        stage.load(lambda name: values[name], dtype=torch.float64)
        rows = 16 // 4 if sp else 16
        x = torch.ones(rows, config.hidden, dtype=torch.float64, requires_grad=True)
        stage(x, mb).sum().backward()
        counted.append(comm.meter.totals())

    run_ranks(4, rank)
    tokens, width = 16, config.hidden
    for counters in counted:
        sent = sum(v for k, v in counters.items() if "wire_bytes" in k and "tensor" in k)
        assert sent == 8 * tokens * width * (4 - 1) / 4 * 8


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sp"])
def test_stages_of_one_rank_chain_to_the_model(tied, sp):
    config, model, values, mb = prepared("llama", tied=tied)
    loss, expected = reference(model, mb)
    parallel = Parallel(tp=2, sp=sp)

    def rank(comm):
        local = LocalModel(
            config,
            {0: range(1), 1: range(1, 2)},
            num_stages=2,
            parallel=parallel,
            ranks=ranks_of(comm),
        )
        for name, part in local.slices.items():
            owner, _, leaf = name.rpartition(".")
            value = torch.nn.Parameter(take(values[name], part))
            setattr(local.get_submodule(owner), leaf, value)
        assert set(local.named()) == set(values)
        assert len(local.units()) == 4
        local.train(False)
        assert not any(stage.training for stage in local.stages.values())
        hidden = local.stages[0](None, mb)
        entry = hidden.detach().requires_grad_()
        total = local.stages[1](entry, mb)
        total.backward()
        hidden.backward(entry.grad)
        return total.item(), {name: p.grad for name, p in local.named().items()}

    results = run_ranks(2, rank)
    assert results[0][0] == pytest.approx(loss, rel=1e-11)
    assert worst(gathered(config, parallel, results), expected) < 1e-10


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("name", ["zigzag"])
def test_context_and_tensor_parallelism_together(name, documents):
    config, model, values, mb = prepared("qwen3", documents=documents)
    dropout = Dropout(0.2, 7)
    loss, expected = reference(model, mb, dropout)
    context = table("context").build(name)

    def rank(comm):
        tp, cp = comm.split([[0, 1], [2, 3]]), comm.split([[0, 2], [1, 3]])
        alone = comm.split([[r] for r in range(4)])
        stage = Stage(
            config,
            range(2),
            first=True,
            last=True,
            parallel=Parallel(tp=2, cp=2, sp=True),
            ranks=Ranks(world=comm, tp=tp, cp=cp, pp=alone, data=cp, model=tp),
            context=context,
            dropout=dropout,
        )
        stage.load(lambda name: values[name], dtype=torch.float64)
        positions = torch.from_numpy(context.positions(8, 2)[cp.rank])
        own = mb._replace(
            tokens=mb.tokens[:, positions], targets=mb.targets[:, positions], positions=positions
        )
        total = stage(None, own, recompute=True)
        total.backward()
        return total.item(), {name: p.grad for name, p in stage.named_parameters()}

    results = run_ranks(4, rank)
    assert results[0][0] + results[2][0] == pytest.approx(loss, rel=1e-11)
    summed = [
        (0.0, {n: results[r][1][n] + results[r + 2][1][n] for n in results[r][1]}) for r in (0, 1)
    ]
    result = gathered(config, Parallel(tp=2, sp=True), summed)
    assert worst(result, expected) < 1e-10


def test_pipeline_ranks_that_share_the_vocabulary_leave_it_out():
    config, model, values, mb = prepared("llama")

    def rank(comm):
        stage = Stage(
            config,
            range(2),
            first=True,
            last=True,
            parallel=Parallel(pp=2, vocab="pp"),
            ranks=ranks_of(comm),
        )
        assert not {"embed.weight", "output.weight"} & set(stage.slices)
        stage.load(lambda name: values[name], dtype=torch.float64)
        with pytest.raises(ConfigError, match="no hidden states"):
            stage(None, mb)
        return stage(values["embed.weight"][mb.tokens].view(16, -1), mb)

    (hidden,) = run_ranks(1, rank)
    assert torch.allclose(hidden.view(2, 8, -1), model.hidden(mb.tokens), rtol=1e-12)


def build(config, parallel, **kw):
    def rank(comm):
        stage = Stage(
            config, range(2), first=True, last=True, parallel=parallel, ranks=ranks_of(comm), **kw
        )
        model = random_model(config)
        stage.load(lambda name: dict(model.named_parameters())[name].detach(), dtype=torch.float64)
        return stage

    return rank


@pytest.mark.parametrize(
    ("changes", "tp", "expected"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, 4, r"divisor of num_heads = 6.*split by 1, 2"),
        ({"num_kv_heads": 2}, 4, r"divisor of num_kv_heads = 2 of model.*split by 1, 2"),
        ({"ffn_hidden": 22}, 4, r"divisor of ffn_hidden = 22.*split by 1, 2"),
    ],
)
def test_what_cannot_be_split_is_refused(changes, tp, expected):
    config = CONFIGS["llama"].model_copy(update=changes)
    with pytest.raises(PlanError, match=expected):
        run_ranks(tp, build(config, Parallel(tp=tp)))


def test_experts_that_do_not_divide_over_ranks_are_refused():
    with pytest.raises(PlanError, match=r"parallel\.ep = 3.*divisor of the 4 experts"):
        slices(CONFIGS["mixtral"], Parallel(dp=3, ep=3), 0)
    with pytest.raises(PlanError, match=r"parallel\.ep = 2.*has no experts"):
        slices(CONFIGS["llama"], Parallel(dp=2, ep=2), 0)


@pytest.mark.parametrize("vocab", ["tp", "none"])
@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("targets", 37, r"label = 37: expected 0 to 36, or -100"),
        ("targets", -3, r"label = -3"),
        ("tokens", 37, r"token id = 37: expected 0 to 36"),
        ("tokens", -1, r"token id = -1"),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(vocab, field, value, expected):
    config, _, _, mb = prepared("llama")
    getattr(mb, field)[1, 3] = value

    def rank(comm):
        with pytest.raises(DataError, match=expected):
            build(config, Parallel(tp=2, vocab=vocab))(comm)(None, mb)

    run_ranks(2, rank)


def test_sequences_beyond_the_model_are_refused():
    config, _, _, mb = prepared("llama", length=65)
    with pytest.raises(ModelError, match="at most max_position = 64"):
        run_ranks(1, lambda comm: build(config, Parallel())(comm)(None, mb))


def test_context_ranks_need_a_context_part():
    def rank(comm):
        alone = comm.split([[r] for r in range(2)])
        Stage(
            CONFIGS["llama"],
            range(2),
            first=True,
            last=True,
            parallel=Parallel(cp=2),
            ranks=Ranks(world=comm, tp=alone, cp=comm, pp=alone, data=comm, model=alone),
        )

    with pytest.raises(ConfigError, match="without a part of kind context"):
        run_ranks(2, rank)
