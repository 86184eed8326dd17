"""``compute`` of a request: the share of a Duo model that its tokens take."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ServeError  # noqa: E402
from shoal.core.random import generator  # noqa: E402
from shoal.ir import Request, SamplingParams  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.duo import DuoFFN  # noqa: E402
from shoal.train.routers import calibrate  # noqa: E402

FIELDS = {
    "vocab_size": 160, "hidden": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "ffn_hidden": 128, "max_position": 512, "initializer_range": 0.15, "tied": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def routed(random_model):
    """A model with random routers that was set to shares."""

    @functools.cache
    def make(router="linear"):
        dtype = torch.float64
        ffn = {"name": "duo", "router": "linear"}
        plain = random_model(ModelConfig(**{**FIELDS, "architecture": {"ffn": ffn}}), dtype=dtype)
        text = generator(5, purpose="text").integers(0, 160, (6, 60))
        shifts = calibrate(plain.eval(), torch.from_numpy(text))
        ffn |= {"shifts": shifts, "router": router}
        config = ModelConfig(**{**FIELDS, "architecture": {"ffn": ffn}})
        return random_model(config, dtype=dtype)

    return make


def asked(*shares, tokens=24, prompt_tokens=40, **sampling):
    source = generator(3, purpose="prompts")
    requests = []
    for number, share in enumerate(shares):
        prompt = source.integers(0, 160, prompt_tokens).tolist()
        params = SamplingParams(max_tokens=tokens, compute=share, **sampling)
        requests.append(Request(f"r{number}", prompt, len(prompt), params))
    return requests


def answers(engine, requests):
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    return [request.tokens[request.n_prompt :] for request in requests]


class Meter:
    """Rows of every feed-forward product, over what all big would have taken."""

    def __init__(self, model):
        self.layers = [one for one in model.modules() if isinstance(one, DuoFFN)]
        self.tokens = self.spent = 0.0

    def __enter__(self):
        self._hooks = [
            module.register_forward_hook(hook)
            for layer in self.layers
            for module, hook in (
                (layer, self._tokens),
                (layer.small, self._small),
                (layer.gate_up_proj, self._big),
            )
        ]
        return self

    def __exit__(self, *cause):
        for hook in self._hooks:
            hook.remove()

    def _tokens(self, layer, inputs, out):
        self.tokens += inputs[0].numel() / inputs[0].shape[-1]

    def _small(self, layer, inputs, out):
        self.spent += self.layers[0].costs[1] * len(inputs[0])

    def _big(self, layer, inputs, out):
        self.spent += inputs[0].numel() / inputs[0].shape[-1]

    @property
    def share(self):
        return self.spent / self.tokens


@pytest.mark.slow
@pytest.mark.parametrize("router", ["linear", "fixed"])
@pytest.mark.parametrize("share", [0.25, 0.6, 1.0])
def test_computation_follows_it(share, router, routed, engine_for):
    model = routed(router)
    with Meter(model) as meter:
        # Of a prompt's tokens the last layer computes one, so most tokens are new ones here; drawn,
        # they are spread as the tokens on which shares were measured.
        more = {"tokens": 100, "prompt_tokens": 2, "temperature": 1.5}
        answers(engine_for(model), asked(share, share, **more))
    assert meter.share == pytest.approx(share, abs=0.1 if share < 1 else 0)


@pytest.mark.parametrize("speculative", [None, pytest.param("ngram", marks=pytest.mark.slow)])
def test_each_request_gets_its_own_whoever_is_beside_it(speculative, routed, engine_for):
    model = routed()
    shares = (None, 0.2, 1.0, 0.5, None)
    engine = engine_for(model, max_step_tokens=48, kv={"name": "paged", "block_size": 4})
    alone = [answers(engine, [one])[0] for one in asked(*shares)]
    together = engine_for(model, max_step_tokens=48, speculative=speculative)
    assert answers(together, asked(*shares)) == alone
    assert answers(engine_for(model), asked(*[1.0] * 5)) != alone


@pytest.mark.slow
def test_all_big_is_the_fixed_model(routed, engine_for):
    big = answers(engine_for(routed("fixed")), asked(None, None))
    assert answers(engine_for(routed("linear")), asked(1.0, 1.0)) == big


@pytest.mark.slow
def test_a_prompt_is_not_taken_from_a_request_of_another_share(routed, engine_for):
    model = routed()
    want = answers(engine_for(model), asked(0.2))
    engine = engine_for(model)
    for share in (None, 1.0, 0.2, 0.2):
        (one,) = asked(share)
        answers(engine, [one])
    assert [one.tokens[one.n_prompt :] for one in [one]] == want
    assert one.n_cached > 0  # of the same share it is


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_what_is_no_share_is_refused(share, routed, engine_for):
    with pytest.raises(ServeError, match=r"compute = .*\(0, 1\]"):
        engine_for(routed()).add(asked(share)[0])


def test_models_without_trained_routers_refuse_it(random_model, engine_for):
    for ffn in ("plain", "duo", {"name": "duo", "router": "random"}):
        model = random_model(ModelConfig(**{**FIELDS, "architecture": {"ffn": ffn}}))
        with pytest.raises(ServeError, match="shoal model routers"):
            engine_for(model).add(asked(0.5)[0])
