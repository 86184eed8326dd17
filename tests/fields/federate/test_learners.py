"""Learners beside the networks: of scikit-learn, of the user's own, and language models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from sklearn.linear_model import SGDClassifier

from shoal.core.errors import ConfigError, ShoalError
from shoal.core.parts import table
from shoal.fields.federate.learn.protocols import Examples, LocalSettings
from shoal.fields.federate.protocols import FederationError, LocalJob

JOB = LocalJob(number=3, client="c0", version=0, steps=12, started=0.0)
SETTINGS = LocalSettings(lr=0.05, momentum=0.0, batch=16, prox=0.0, seed=1)


def learner(name: str, **options: object):
    return table("learner").build({"name": name, **options})


def tabular(classes: int = 3, rows: int = 80, width: int = 4) -> Examples:
    draw = np.random.default_rng(0)
    y = draw.integers(classes, size=rows)
    x = draw.normal(size=(rows, width)) + 3 * np.eye(classes, width)[y]
    return Examples(x=x.astype(np.float32), y=y, classes=classes)


def texts(rows: int = 24, length: int = 8) -> Examples:
    line = np.resize(np.frombuffer(b"abcabcabcabc", np.uint8), rows * length + 1).astype(np.int64)
    x, y = line[:-1].reshape(rows, length), line[1:].reshape(rows, length)
    return Examples(x=x, y=y, classes=256)


@pytest.mark.parametrize("classes", [2, 3])
def test_linear_is_what_scikit_learn_does_with_the_same_rows(classes: int) -> None:
    examples = tabular(classes)
    learning = learner("linear").build((4,), classes)
    assert learning.size == learner("linear").shape((4,), classes)[0]
    after, loss = learning.fit(learning.start(0), examples, JOB, SETTINGS)
    # One batch as large as all rows leaves only their order to chance: none for one row.
    one = examples.rows(np.array([5]))
    moved, _ = learning.fit(learning.start(0), one, JOB, SETTINGS)
    own = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.05, shuffle=False)
    for _ in range(JOB.steps):
        own.partial_fit(one.x, one.y, classes=np.arange(classes))
    np.testing.assert_allclose(moved[: own.coef_.size], own.coef_.ravel(), atol=1e-6)
    np.testing.assert_allclose(moved[own.coef_.size :], own.intercept_, atol=1e-6)
    said = learning.evaluate(after, examples)
    assert said["accuracy"] > 0.9
    assert loss == pytest.approx(said["loss"])
    assert learning.evaluate(learning.start(0), examples)["loss"] == pytest.approx(
        np.log(classes), rel=1e-5
    )


def test_linear_refuses_what_it_has_not() -> None:
    learning = learner("linear").build((4,), 3)
    heavy = LocalSettings(lr=0.1, momentum=0.9, batch=8, prox=0.0, seed=0)
    with pytest.raises(FederationError, match=r"momentum = 0\.9"):
        learning.fit(learning.start(0), tabular(), JOB, heavy)
    with pytest.raises(FederationError, match="texts"):
        learning.fit(learning.start(0), texts(), JOB, SETTINGS)
    with pytest.raises(ConfigError):
        learner("linear", loss="squared")


NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
        self.still = nn.Parameter(torch.ones(2), requires_grad=False)
    def forward(self, x):
        return self.layers(x)

def maker():
    return 3
"""


def test_a_module_of_the_user_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    for path in (f"{tmp_path}/my_nets.py:Net", "my_nets:Net"):
        part = learner("module", path=path, arguments={"width": 6})
        size, flops = part.shape((4,), 3)
        learning = part.build((4,), 3)
        # Both layers, scale and shift of the normalization, its mean and variance; not `still`.
        assert learning.size == size == (5 * 6) + 2 * 6 + (7 * 3) + 2 * 6
        assert flops == pytest.approx(6 * (4 * 6 + 6 * 3))
        begin = learning.start(0)
        np.testing.assert_array_equal(begin, part.build((4,), 3).start(0))
        after, _ = learning.fit(begin, tabular(), JOB, SETTINGS)
        assert learning.evaluate(after, tabular())["accuracy"] > 0.8


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("my_nets", {}, "expected package"),
        ("my_nets.py:Absent", {}, "cannot be imported"),
        ("absent.py:Net", {}, "cannot be imported"),
        ("my_nets.py:maker", {}, "makes a int"),
        ("my_nets.py:Net", {"depth": 2}, "depth"),
    ],
)
def test_a_module_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, options: dict, words: str
) -> None:
    (tmp_path / "my_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FederationError, match=words):
        learner("module", path=path, arguments=options).shape((4,), 3)


def test_a_module_of_another_width_is_refused_in_planning(tmp_path: Path) -> None:
    (tmp_path / "my_nets.py").write_text(NETS)
    part = learner("module", path=f"{tmp_path}/my_nets.py:Net")
    with pytest.raises(FederationError, match="fails on examples"):
        part.shape((7,), 3)
    with pytest.raises(FederationError, match="logits"):
        part.shape((4,), 5)


def test_a_tiny_language_model_learns_and_sees_no_later_token() -> None:
    part = learner("tiny_lm", width=16, depth=1, heads=2)
    learning = part.build((8,), 256)
    assert learning.size == part.shape((8,), 256)[0]
    examples = texts()
    fast = LocalSettings(lr=0.3, momentum=0.9, batch=8, prox=0.0, seed=0)
    job = LocalJob(number=1, client="c0", version=0, steps=60, started=0.0)
    after, _ = learning.fit(learning.start(0), examples, job, fast)
    before = learning.evaluate(learning.start(0), examples)["loss"]
    assert before == pytest.approx(np.log(256), rel=0.1)
    assert learning.evaluate(after, examples)["loss"] < before / 2
    import torch

    module = learning._module.eval()
    x = torch.from_numpy(examples.x[:1].copy())
    first = module(x)
    x[0, -1] = 7
    torch.testing.assert_close(module(x)[0, :-1], first[0, :-1])
    with pytest.raises(FederationError, match="no texts"):
        part.build((1, 8, 8), 10)
    with pytest.raises(FederationError, match="multiple"):
        learner("tiny_lm", width=10, heads=4).build((8,), 256)


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    import torch

    from shoal.cost.shapes import find
    from shoal.model.config import ModelConfig
    from shoal.model.huggingface import write
    from shoal.model.initialise import init_weights
    from shoal.model.transformer import Transformer

    shape = find("shoal-1m").model_copy(update={"vocab_size": 256})
    model = Transformer(ModelConfig.from_shape(shape))
    torch.manual_seed(0)
    init_weights(model, 0)
    write(tmp_path / "base", model)
    return tmp_path / "base"


def test_only_adapters_travel_and_fresh_ones_change_nothing(model_directory: Path) -> None:
    from shoal.model.huggingface import read

    part = learner("lora", model=str(model_directory), r=2)
    learning = part.build((8,), 256)
    base = read(model_directory)
    whole = sum(one.numel() for one in base.parameters())
    assert learning.size == part.shape((8,), 256)[0] < whole / 20
    frozen = {name for name, _ in base.named_parameters()}
    assert not frozen & {name for name, _ in learning.layout}
    begin, examples = learning.start(0), texts()
    import torch

    logits = base(torch.from_numpy(examples.x))
    labels = torch.from_numpy(examples.y).flatten()
    own = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels).detach())
    assert learning.evaluate(begin, examples)["loss"] == pytest.approx(own, rel=1e-4)
    fast = LocalSettings(lr=0.05, momentum=0.0, batch=8, prox=0.0, seed=0)
    after, _ = learning.fit(begin, examples, JOB, fast)
    assert learning.evaluate(after, examples)["loss"] < own
    # The base is what it was: the first model answers as before.
    assert learning.evaluate(begin, examples)["loss"] == pytest.approx(own, rel=1e-4)


def test_adapters_need_a_model_and_its_vocabulary(model_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="absent"):
        learner("lora", model=str(tmp_path / "absent")).shape((8,), 256)
    with pytest.raises(FederationError, match="no directory of a model"):
        learner("lora", model="shoal-1m").build((8,), 256)
    with pytest.raises(FederationError, match="the data has 1000 tokens"):
        learner("lora", model=str(model_directory)).build((8,), 1000)
