"""scikit-learn's linear classifiers, which learn by stochastic gradient descent.

Source: Pedregosa et al., Scikit-learn: Machine Learning in Python, 2011.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from shoal.core.extras import import_extra
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.learn.protocols import Examples, Learning, LocalSettings
from shoal.fields.federate.protocols import FederationError, LocalJob


@part
class SgdLinear:
    """``SGDClassifier``: one weight vector for each class against the others; one for two classes.

    A local step is one pass over its batch, an example after the other. ``momentum`` and ``prox``
    of the job do not exist here.

    Args:
        loss: log_loss is logistic regression, hinge a linear support vector machine.
        penalty: on the weights.
        alpha: its weight.
    """

    loss: Literal["log_loss", "hinge", "modified_huber", "perceptron"] = "log_loss"
    penalty: Literal["l2", "l1", "elasticnet"] = "l2"
    alpha: Annotated[float, Ge(0)] = 1e-4

    def shape(self, features: tuple[int, ...], classes: int) -> tuple[int, float]:
        """One row of weights with a bias for each class; a single one for two."""
        width, rows = math.prod(features), classes if classes > 2 else 1
        return (width + 1) * rows, 6.0 * width * rows

    def build(self, features: tuple[int, ...], classes: int) -> Learning:
        """Needs scikit-learn."""
        return LinearLearning(self, math.prod(features), classes)


class LinearLearning:
    """A linear model as a vector: ``coef_``, then ``intercept_``.

    Attributes:
        layout: name and shape of both.
    """

    def __init__(self, part: SgdLinear, width: int, classes: int) -> None:
        self._part, self._width, self._classes = part, width, classes
        rows = classes if classes > 2 else 1
        self.layout: tuple[tuple[str, tuple[int, ...]], ...] = (
            ("coef_", (rows, width)),
            ("intercept_", (rows,)),
        )

    @property
    def size(self) -> int:
        """Weights and biases."""
        return sum(math.prod(shape) for _, shape in self.layout)

    def start(self, seed: int) -> np.ndarray:
        """Zeros, as scikit-learn begins."""
        return np.zeros(self.size, np.float32)

    def fit(
        self, model: np.ndarray, examples: Examples, job: LocalJob, settings: LocalSettings
    ) -> tuple[np.ndarray, float]:
        """``partial_fit`` on random batches with a constant rate; the loss is that after it.

        Raises:
            FederationError: the job has momentum or prox.
        """
        if settings.momentum or settings.prox:
            raise FederationError(
                f"learner linear: momentum = {settings.momentum:g}, prox = {settings.prox:g}; "
                "scikit-learn's linear models have neither: set both to 0"
            )
        estimator = self._estimator(model, settings.lr)
        x = _flat(examples)
        draw = generator(settings.seed, purpose="local batches", step=job.number)
        batch = min(settings.batch, len(examples))
        order = np.empty(0, np.int64)
        for _ in range(job.steps):
            if len(order) < batch:
                order = draw.permutation(len(examples))
            rows, order = order[:batch], order[batch:]
            estimator.partial_fit(x[rows], examples.y[rows])
        after = np.concatenate([estimator.coef_.ravel(), estimator.intercept_]).astype(np.float32)
        return after, self.evaluate(after, examples)["loss"]

    def evaluate(self, model: np.ndarray, examples: Examples) -> dict[str, float]:
        """Mean cross-entropy of probabilities, or hinge loss where there are none; accuracy."""
        metrics = import_extra("sklearn.metrics", extra="fields", purpose="linear learners")
        estimator, x = self._estimator(model, 1.0), _flat(examples)
        labels = np.arange(self._classes)
        if hasattr(estimator, "predict_proba"):
            shares = estimator.predict_proba(x).astype(np.float64)
            shares /= shares.sum(1, keepdims=True)  # of float32 they do not add up to 1
            loss = metrics.log_loss(examples.y, shares, labels=labels)
        else:
            loss = metrics.hinge_loss(examples.y, estimator.decision_function(x), labels=labels)
        right = float((estimator.predict(x) == examples.y).mean())
        return {"loss": float(loss), "accuracy": right}

    def _estimator(self, model: np.ndarray, lr: float) -> Any:
        """An estimator that stands at a model."""
        linear = import_extra("sklearn.linear_model", extra="fields", purpose="linear learners")
        part = self._part
        estimator = linear.SGDClassifier(
            loss=part.loss, penalty=part.penalty, alpha=part.alpha, learning_rate="constant",
            eta0=lr, shuffle=False,
        )  # fmt: skip
        # Its state is made by a first call, and then replaced.
        labels = np.arange(self._classes)
        estimator.partial_fit(np.zeros((1, self._width), np.float32), labels[:1], classes=labels)
        cut = math.prod(self.layout[0][1])
        estimator.coef_[...] = model[:cut].reshape(estimator.coef_.shape)
        estimator.intercept_[...] = model[cut:]
        estimator.t_ = 1.0
        return estimator


def _flat(examples: Examples) -> np.ndarray:
    """Features float32 [N, F].

    Raises:
        FederationError: they are texts.
    """
    if examples.y.ndim != 1:
        raise FederationError("learner linear: the examples are texts; take tiny_lm or lora")
    return np.ascontiguousarray(examples.x.reshape(len(examples), -1), np.float32)
