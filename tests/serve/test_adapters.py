"""Adapters beside each other in one step: what each request gets is what its own model gives."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, ServeError  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402
from shoal.serve.adapters.loaded import SERVED, AdapterBank  # noqa: E402
from shoal.train.peft import files  # noqa: E402

EVERY = "*.q_proj|*.v_proj|*.o_proj|*.gate_proj|*.down_proj"


def shaken(model, name, seed, **options):
    """A method in a copy of a model, as if it had been trained."""
    own = copy.deepcopy(model)
    handle = table("peft").build({"name": name, "targets": EVERY, **options}).inject(own, seed=seed)
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in handle.trainable().values():
            value.add_(torch.randn(value.shape, generator=source) * 0.2)
    return own, handle


@pytest.fixture(scope="module")
def tuned(random_model, tmp_path_factory):
    """A base, and of each adapter its directory and its merged model."""
    base = random_model("qwen3")
    result = {}
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(SERVED):
        options = {"r": 3 + number} if name != "vera" else {}
        if name == "adalora":
            options["target"] = 2
        _, handle = shaken(base, name, number, **options)
        files.write(folder / name, handle)
        result[name] = str(folder / name), handle.keep_merged().requires_grad_(False)
    return base, result


def answers(engine, asked, **sampling):
    """The new tokens of (prompt, adapter) each, all at once."""
    params = SamplingParams(max_tokens=12, **sampling)
    requests = [
        Request(f"r{n}", list(prompt), len(prompt), params, adapter=adapter)
        for n, (prompt, adapter) in enumerate(asked)
    ]
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    return [request.tokens[request.n_prompt :] for request in requests]


def prompts(count, length=9):
    source = torch.Generator().manual_seed(7)
    return torch.randint(0, 160, (count, length), generator=source).tolist()


@pytest.mark.parametrize("together", [2, 14])
def test_a_mixed_batch_is_each_ones_own_model(tuned, engine_for, together):
    base, result = tuned
    engine = engine_for(
        copy.deepcopy(base),
        precision="fp32",
        adapters={name: place for name, (place, _) in result.items()},
    )
    names = [None, *result]
    requests = [(p, names[n % len(names)]) for n, p in enumerate(prompts(together, 40))]
    got = answers(engine, requests)
    for (prompt, name), tokens in zip(requests, got, strict=True):
        alone = base if name is None else result[name][1]
        want = answers(engine_for(copy.deepcopy(alone), precision="fp32"), [(prompt, None)])[0]
        assert tokens == want, name


def test_the_cache_of_one_adapter_serves_no_other(tuned, engine_for):
    base, result = tuned
    engine = engine_for(copy.deepcopy(base), precision="fp32", max_adapters=2)
    bank = engine.hooks["adapters"].bank
    prompt = prompts(1, 48)[0]
    given = {}
    for name in ("lora", "rslora"):
        bank.load("same", Path(result[name][0]))
        given[name] = answers(engine, [(prompt, "same")])[0]
        bank.unload("same")
    for name, tokens in given.items():
        want = answers(
            engine_for(copy.deepcopy(result[name][1]), precision="fp32"), [(prompt, None)]
        )
        assert tokens == want[0]


def test_loading_and_unloading(tuned, engine_for, tmp_path):
    base, result = tuned
    engine = engine_for(copy.deepcopy(base), precision="fp32", max_adapters=1, max_adapter_rank=4)
    bank = engine.hooks["adapters"].bank
    place = Path(result["lora"][0])
    with pytest.raises(ServeError, match="no such adapter"):
        engine.add(Request("x", [1, 2], 2, SamplingParams(max_tokens=2), adapter="sql"))
    bank.load("sql", place)
    with pytest.raises(ServeError, match="a name that none has"):
        bank.load("sql", place)
    with pytest.raises(ServeError, match="max_adapters = 1"):
        bank.load("more", place)
    engine.add(Request("x", [1, 2], 2, SamplingParams(max_tokens=2), adapter="sql"))
    with pytest.raises(ServeError, match="open requests"):
        bank.unload("sql")
    while engine.busy:
        engine.step()
    bank.unload("sql")
    with pytest.raises(ServeError, match="max_adapter_rank = 4"):
        bank.load("big", Path(result["adalora"][0]))
    with pytest.raises(ServeError, match="adapter_config"):
        bank.load("none", tmp_path)
    _, handle = shaken(base, "dora", 0)
    files.write(tmp_path / "dora", handle)
    with pytest.raises(ServeError, match="method = 'dora'"):
        bank.load("dora", tmp_path / "dora")


def test_low_bit_weights_and_bf16_go_with_adapters(tuned, engine_for):
    from shoal.serve.engine.build import prepare

    base, result = tuned
    job = ServeJob(
        model="tiny", weights="int8-channel", precision="fp32", adapters={"a": result["lora"][0]}
    )
    engine = engine_for(prepare(job, copy.deepcopy(base)), precision="fp32", adapters=job.adapters)
    plain, adapted = answers(engine, [(prompts(1)[0], None), (prompts(1)[0], "a")])
    assert plain != adapted


def products(bank, adapter=None):
    """What every layer gives for the same five rows of one adapter, or of the model itself."""
    from shoal.ir import Chunk

    request = Request("s", [1] * 5, 5, SamplingParams(max_tokens=1))
    request.adapter = None if adapter is None else bank._keys[adapter]
    bank.begin([Chunk(request, 0, 5)])
    made = []
    with torch.inference_mode():
        for layer in bank._layers.values():
            rows = torch.randn(
                5, layer.base.in_features, generator=torch.Generator().manual_seed(3)
            )
            made.append(layer(rows.to(bank._model.weight.dtype)).float().flatten())
    bank.rows = bank.needed = None
    return torch.cat(made)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_merged_adapter_is_itself_and_leaves_no_trace(tuned, engine_for, precision):
    from shoal.serve.engine.build import prepare

    base, result = tuned
    prompt, other = prompts(2, 21)
    names = {name: result[name][0] for name in ("lora", "rslora")}
    job = ServeJob(model="tiny", precision=precision, adapters=names)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    made = prepare(job, copy.deepcopy(base).to(dtype))
    engine = engine_for(made, precision=precision, adapters=names)
    bank = engine.hooks["adapters"].bank
    plain, apart = products(bank), products(bank, "lora")
    before = answers(engine, [(prompt, None), (prompt, "lora"), (other, "rslora")])
    bank.merge("lora")
    merged = products(bank, "lora")
    # Weights are rounded once more where they are merged in bf16, products where they are not.
    close = {"fp32": 1e-5, "bf16": 0.01}[precision] * apart.abs().max()
    assert (merged - apart).abs().max() <= close < (plain - apart).abs().max()
    assert not bank.begin([])
    if precision == "fp32":
        # Twice, so that steps are recorded, too, and never those of another state.
        for _ in range(2):
            assert answers(engine, [(prompt, "lora")]) == before[1:2]
    assert engine.stats()["adapter_merged"] == 1
    assert answers(engine, [(prompt, None), (other, "rslora")]) == [before[0], before[2]]
    assert bank.merged is None and engine.stats()["adapter_switches_total"] == 2
    assert torch.equal(products(bank), plain), "the base is what it was, bit for bit"
    assert torch.equal(products(bank, "lora"), apart)


def test_who_is_merged_when(tuned, engine_for):
    base, result = tuned
    engine = engine_for(
        copy.deepcopy(base),
        precision="fp32",
        adapters={name: result[name][0] for name in ("lora", "rslora")},
    )
    bank = engine.hooks["adapters"].bank
    want = answers(engine, [(prompts(1)[0], "lora")])
    with pytest.raises(ServeError, match="expected one of those in memory: lora, rslora"):
        bank.merge("sql")
    with pytest.raises(ServeError, match="expected the one that is merged: none"):
        bank.unmerge("lora")
    engine.add(Request("x", [1, 2], 2, SamplingParams(max_tokens=2)))
    with pytest.raises(ServeError, match=r"open requests for the model itself .* = 1"):
        bank.merge("lora")
    while engine.busy:
        engine.step()
    # A request that is under way goes on, whether its adapter is merged or taken out again.
    request = Request("y", prompts(1)[0], 9, SamplingParams(max_tokens=12), adapter="lora")
    engine.add(request)
    for change in (None, bank.merge, bank.unmerge, bank.merge):
        engine.step()
        if change is not None:
            change("lora")
    other = Request("z", [1, 2], 2, SamplingParams(max_tokens=2), adapter="rslora")
    engine.add(other)
    assert bank.merged is None
    while engine.busy:
        engine.step()
    assert [request.tokens[9:]] == want
    bank.merge("lora")
    bank.unload("lora")
    assert bank.merged is None and bank.names == ("rslora",)


def test_no_recorded_step_computes_with_weights_that_are_gone(tuned, engine_for):
    from shoal.serve.engine.build import prepare

    base, result = tuned
    places = first, second = result["lora"][0], result["rslora"][0]
    asked = [(prompts(1)[0], "one")]

    def served(place):
        fields = {"precision": "fp32", "adapters": {"one": place}}
        job = ServeJob(model="tiny", **fields)
        return engine_for(prepare(job, copy.deepcopy(base)), **fields)

    want = {place: answers(served(place), asked) for place in places}
    assert want[first] != want[second]
    engine = served(first)
    bank = engine.hooks["adapters"].bank
    for place in (*places, first):
        # Nothing is computed between one that is merged and the next of the same name.
        bank.unload("one")
        bank.load("one", Path(place))
        bank.merge("one")
        for _ in range(2):
            assert answers(engine, asked) == want[place]
    assert not engine.hooks["recording"].reasons, "steps were recorded"


def test_weights_in_few_bits_take_no_adapter_in(tuned, engine_for):
    from shoal.serve.engine.build import prepare

    base, result = tuned
    job = ServeJob(
        model="tiny", weights="int8-channel", precision="fp32", adapters={"a": result["lora"][0]}
    )
    engine = engine_for(prepare(job, copy.deepcopy(base)), precision="fp32", adapters=job.adapters)
    with pytest.raises(ServeError, match="few bits"):
        engine.hooks["adapters"].bank.merge("a")
    assert engine.hooks["adapters"].bank.merged is None


@pytest.mark.parametrize(
    "changes", [{"replicas": 2}, {"parallel": {"tp": 2}}, {"disagg": {}}, {"kv": "distributed"}]
)
def test_what_adapters_do_not_go_with(changes):
    with pytest.raises(ConfigError, match="with adapters"):
        ServeJob.model_validate({"model": "tiny", "max_adapters": 2, **changes})


def test_rows_are_given_to_whom_they_belong(random_model):
    bank = AdapterBank(random_model(), most=4, max_rank=8)
    bank._slots = {"a": 0, "b": 1}
    rows = bank._rows([(0, 2), (0, 1), (-1, 3), (1, 1)])
    assert rows.runs == [(0, 3, 0), (6, 7, 1)]
    assert rows.single is None
    rows = bank._rows([(0, 1), (1, 1), (0, 1), (-1, 1), (1, 40)])
    assert rows.runs == [(4, 44, 1)]
    assert rows.single.tolist() == [0, 1, 2]
    assert rows.mask.tolist() == [[False, True], [True, False], [False, True]]


def test_a_request_that_is_refused_is_not_open(tuned, engine_for):
    base, result = tuned
    engine = engine_for(
        copy.deepcopy(base), precision="fp32", adapters={"lora": result["lora"][0]}, max_position=64
    )
    for adapter in (None, "lora"):
        with pytest.raises(ServeError):
            engine.add(Request("x", [1] * 80, 80, SamplingParams(max_tokens=2), adapter=adapter))
    engine.hooks["adapters"].bank.merge("lora")
    engine.hooks["adapters"].bank.unload("lora")
