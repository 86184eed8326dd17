"""Server optimizers against the paper's formulas written out; FedProx against its gradient."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.fields.federate.learn.protocols import Examples, LocalSettings
from shoal.fields.federate.protocols import LocalJob


def oracle(name, directions, lr, b1, b2, tau):
    """Reddi et al., algorithm 2, one coordinate at a time."""
    size = len(directions[0])
    x, m, v = [0.0] * size, [0.0] * size, [tau**2] * size
    for d in directions:
        for i in range(size):
            m[i] = b1 * m[i] + (1 - b1) * -float(d[i])
            square = float(d[i]) ** 2
            if name == "adam":
                v[i] = b2 * v[i] + (1 - b2) * square
            else:
                v[i] = v[i] - (1 - b2) * square * ((v[i] > square) - (v[i] < square))
            x[i] += lr * m[i] / (v[i] ** 0.5 + tau)
    return x


@pytest.mark.parametrize("name", ["adam", "yogi"])
def test_adaptive_steps_are_those_of_the_paper(name):
    options = {"lr": 0.1, "b1": 0.8, "b2": 0.95, "tau": 0.01}
    draw = np.random.default_rng(0)
    directions = [draw.normal(size=5).astype(np.float32) * 0.9**at for at in range(12)]
    part = table("server_optimizer").build({"name": name, **options}, where="server")
    state, model = part.start(5), np.zeros(5, np.float32)
    for direction in directions[:6]:
        state.apply(model, direction)
    again = part.start(5)
    again.load(state.state())
    for direction in directions[6:]:
        again.apply(model, direction)
    np.testing.assert_allclose(model, oracle(name, directions, **options), rtol=2e-5)


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match="b2"):
        table("server_optimizer").build({"name": "yogi", "b2": 1.0}, where="server")


def test_prox_pulls_towards_the_model_that_was_received():
    """One step from elsewhere has no pull; the second has the weight times the distance so far."""
    pytest.importorskip("torch")
    draw = np.random.default_rng(1)
    examples = Examples(x=draw.random((8, 3), np.float32), y=draw.integers(2, size=8), classes=2)
    learning = table("learner").build("logistic").build((3,), 2)
    start = learning.start(0)

    def after(prox, steps):
        settings = LocalSettings(lr=0.5, momentum=0.0, batch=8, prox=prox, seed=0)
        some = LocalJob(number=1, client="a", version=0, steps=steps, started=0.0)
        return learning.fit(start, examples, some, settings)[0]

    np.testing.assert_allclose(after(0.4, 1), after(0.0, 1), atol=1e-7)
    moved = after(0.0, 1) - start
    np.testing.assert_allclose(after(0.4, 2), after(0.0, 2) - 0.5 * 0.4 * moved, atol=1e-6)
