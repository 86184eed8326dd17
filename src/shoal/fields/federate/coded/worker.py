"""A process that computes gradients of some examples, and sleeps as long as it is asked to.

What it is working on is given up when the server begins the next round.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.federate.coded.protocols import CodedError, GradientLearning
from shoal.fields.federate.learn.protocols import Examples
from shoal.fields.federate.wire.star import Message, Spoke, connect, frame


class CodedWorker:
    """The worker's state: the data, and models of the jobs that are open.

    Args:
        spoke: its connection; its setting names the ``learner`` and the number of ``classes``.
        data: the first message, with tensors ``x`` and ``y``.
    """

    def __init__(self, spoke: Spoke, data: Message) -> None:
        self._spoke = spoke
        tensors, _ = data
        classes = int(spoke.setting["classes"])
        self._data = Examples(x=tensors["x"], y=tensors["y"], classes=classes)
        self._learning = gradients_of(
            Choice.model_validate(spoke.setting["learner"]), self._data.x.shape[1:], classes
        )
        self._models: dict[int, np.ndarray] = {}
        self._run = -1

    def take(self, message: Message) -> dict[str, Any]:
        """Keep the model of a round's message; its words."""
        tensors, words = message
        if words["run"] != self._run:
            self._run, self._models = words["run"], {}
        if "model" in tensors:
            self._models[words["round"]] = tensors["model"]
        self._models = {at: one for at, one in self._models.items() if at >= words["oldest"]}
        return words

    def results(self, words: dict[str, Any]) -> tuple[dict[str, np.ndarray], int]:
        """Weighted sums of gradients, by job, and how many examples they took."""
        found, count = {}, 0
        for job, parts in words["tasks"]:
            total = np.zeros(len(self._models[job]))
            for start, stop, weight in parts:
                if stop > start:
                    rows = self._data.rows(np.arange(start, stop))
                    mean, _ = self._learning.gradient(self._models[job], rows)
                    total += weight * len(rows) * mean.astype(np.float64)
                    count += len(rows)
            found[str(job)] = total.astype(np.float32)
        return found, count

    def serve(self) -> None:
        """Work on the newest message until the server ends the connection."""
        message = self._spoke.receive()
        while True:
            assert message is not None
            begun = time.monotonic()
            words = self.take(message)
            message = self._spoke.receive(0.0)
            if message is not None:  # the round is over already
                continue
            found, count = self.results(words)
            message = self._spoke.receive(max(0.0, begun + words["sleep_s"] - time.monotonic()))
            if message is None:
                head = {"run": words["run"], "round": words["round"], "examples": count}
                self._spoke.send(frame(found, head))
                message = self._spoke.receive()


def gradients_of(learner: Choice, features: tuple[int, ...], classes: int) -> GradientLearning:
    """A model that says its gradient.

    Raises:
        CodedError: the learner has none.
    """
    learning = table("learner").build(learner, where="learner").build(features, classes)
    if not isinstance(learning, GradientLearning):
        raise CodedError(f"learner = {learner}: has no gradients; take cnn_digits, mlp or logistic")
    return learning


def main() -> None:
    """Read the data, then work."""
    import torch

    torch.set_num_threads(1)
    spoke = connect()
    data = spoke.receive()
    assert data is not None
    CodedWorker(spoke, data).serve()


if __name__ == "__main__":
    main()
