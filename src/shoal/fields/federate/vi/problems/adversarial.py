"""Adversarial training of a small language model: a perturbation of its embeddings is maximized.

Source: Zhu et al., FreeLB: Enhanced Adversarial Training for Natural Language Understanding, 2020
(the problem); Beznosikov et al., Distributed Methods with Compressed Communication for Solving
Variational Inequalities, with Theoretical Guarantees, 2022 (solved with compressed messages).
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt

from shoal.core.parts import part, table
from shoal.core.random import generator
from shoal.fields.federate.vi.protocols import ViError

# Share of the windows that the robust loss is measured on, most of them, steps of the attack.
_HELD, _WINDOWS, _ATTACK = 0.2, 256, 10
# Windows of a gradient of all data at a time.
_BLOCK = 64


@part
class AdversarialLm:
    """min over weights, max over a perturbation in a ball, of the loss of the next character.

    The perturbation [context, width] is added to the embeddings of every window.

    Args:
        corpus: text; worker m has every M-th document.
        characters: of each worker's text, which is cut into windows; the last fifth is held out.
        vocabulary: distinct characters, the most frequent; all others are one.
        context: characters that the model sees.
        width: of its embeddings; one block of attention and a perceptron four times as wide.
        heads: of attention.
        radius: of the ball, in the L2 norm.
        batch: windows of a sample.
    """

    corpus: str = "stdlib"
    characters: Annotated[int, Ge(1000)] = 20_000
    vocabulary: Annotated[int, Ge(2)] = 64
    context: Annotated[int, Ge(2)] = 32
    width: Annotated[int, Ge(2)] = 32
    heads: Annotated[int, Ge(1)] = 2
    radius: Annotated[float, Gt(0)] = 1.0
    batch: Annotated[int, Ge(1)] = 16

    def build(self, workers: int, seed: int) -> AdversarialOperator:
        """The text is read, and torch imported, when it is first evaluated."""
        if self.width % self.heads:
            raise ViError(
                f"problem.adversarial_lm: width {self.width} is no multiple of {self.heads} heads"
            )
        return AdversarialOperator(self, workers, seed)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights by name."""
        d = self.width
        return {
            "embedding": (self.vocabulary, d),
            "position": (self.context, d),
            "attention": (3 * d, d),
            "projection": (d, d),
            "up": (4 * d, d),
            "down": (d, 4 * d),
        }


class AdversarialOperator:
    """Gradients of the loss with respect to weights, and of its opposite to the perturbation.

    Args:
        problem: its shape.
        workers: M.
        seed: of the first weights.
    """

    constrained = True
    constants = None

    def __init__(self, problem: AdversarialLm, workers: int, seed: int) -> None:
        self._problem, self._seed, self.workers = problem, seed, workers
        self._shapes = problem.shapes()
        self._weights = sum(map(math.prod, self._shapes.values()))
        self.size = self._weights + problem.context * problem.width
        self.flops = 6.0 * self._weights * problem.characters * (1 - _HELD)

    def start(self) -> np.ndarray:
        """Normal weights scaled by fan-in, and no perturbation."""
        draw = generator(self._seed, purpose="adversarial language model")
        weights = [
            draw.standard_normal(math.prod(shape)) / math.sqrt(shape[-1])
            for shape in self._shapes.values()
        ]
        return np.concatenate([*weights, np.zeros(self.size - self._weights)])

    def value(self, worker: int, z: np.ndarray, sample: np.random.Generator | None) -> np.ndarray:
        """On all windows of the worker; with a sample, on a batch of them."""
        windows, _ = self._texts[worker]
        if sample is not None:
            windows = windows[sample.integers(len(windows), size=self._problem.batch)]
        _, gradient = self._gradient(z, windows)
        gradient[self._weights :] *= -1
        return gradient

    def prox(self, z: np.ndarray, step: float) -> np.ndarray:
        """The nearest point with the perturbation in its ball."""
        norm = float(np.linalg.norm(z[self._weights :]))
        if norm <= self._problem.radius:
            return z
        result = z.copy()
        result[self._weights :] *= self._problem.radius / norm
        return result

    def error(self, z: np.ndarray) -> None:
        """Nobody knows a solution."""
        return

    def judge(self, z: np.ndarray) -> dict[str, float]:
        """Losses on held-out text: clean, and with the worst perturbation that ascent finds."""
        windows = np.concatenate([held for _, held in self._texts])[:_WINDOWS]
        at = z.copy()
        at[self._weights :] = 0.0
        clean, gradient = self._gradient(at, windows)
        worst = clean
        for start in ("gradient", "given"):
            at[self._weights :] = 0.0 if start == "gradient" else z[self._weights :]
            for _ in range(_ATTACK):
                loss, gradient = self._gradient(at, windows)
                worst = max(worst, loss)
                up = gradient[self._weights :]
                at[self._weights :] += (
                    up * self._problem.radius / 4 / max(float(np.linalg.norm(up)), 1e-30)
                )
                at = self.prox(at, 1.0)
            worst = max(worst, self._gradient(at, windows)[0])
        return {"clean_loss": clean, "robust_loss": worst}

    @functools.cached_property
    def _texts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Windows of each worker to train on and held out, int64 [K, context + 1].

        Characters are numbered by frequency; 0 is all others.
        """
        problem = self._problem
        texts = [""] * self.workers
        for at, one in enumerate(table("corpus").build(problem.corpus).documents()):
            worker = at % self.workers
            texts[worker] += one.text[: problem.characters - len(texts[worker])]
            if min(map(len, texts)) == problem.characters:
                break
        if min(map(len, texts)) < 20 * problem.context:
            raise ViError(
                f"problem.adversarial_lm: the text of a worker has {min(map(len, texts))} "
                "characters; give a larger corpus or fewer workers"
            )
        codes = [np.frombuffer(text.encode("utf-32-le"), np.uint32) for text in texts]
        names, counts = np.unique(np.concatenate(codes), return_counts=True)
        number = np.zeros(len(names), np.int64)
        kept = np.argsort(-counts, kind="stable")[: problem.vocabulary - 1]
        number[kept] = np.arange(1, len(kept) + 1)
        result, length = [], problem.context + 1
        for one in codes:
            ids = number[np.searchsorted(names, one)]
            windows = ids[: len(ids) // length * length].reshape(-1, length)
            cut = round(len(windows) * (1 - _HELD))
            result.append((windows[:cut], windows[cut:]))
        return result

    def _gradient(self, z: np.ndarray, windows: np.ndarray) -> tuple[float, np.ndarray]:
        """The mean loss, and its gradient float64 [n]."""
        import torch

        flat = torch.from_numpy(z.astype(np.float32)).requires_grad_()
        mean, total = 0.0, np.zeros(self.size)
        for at in range(0, len(windows), _BLOCK):
            some = windows[at : at + _BLOCK]
            loss = self._loss(flat, torch.from_numpy(some))
            (gradient,) = torch.autograd.grad(loss, flat)
            mean += float(loss.detach()) * len(some) / len(windows)
            total += gradient.numpy() * (len(some) / len(windows))
        return mean, total

    def _loss(self, flat: Any, windows: Any) -> Any:
        from torch.nn import functional as F

        problem, at, tensors = self._problem, 0, {}
        for name, shape in self._shapes.items():
            tensors[name] = flat[at : at + math.prod(shape)].view(shape)
            at += math.prod(shape)
        width, heads = problem.width, problem.heads
        x = tensors["embedding"][windows[:, :-1]] + tensors["position"] + flat[at:].view(-1, width)
        rows, length = x.shape[:2]
        query, key, value = (
            one.view(rows, length, heads, width // heads).transpose(1, 2)
            for one in F.linear(F.layer_norm(x, (width,)), tensors["attention"]).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(rows, length, width), tensors["projection"])
        hidden = F.gelu(F.linear(F.layer_norm(x, (width,)), tensors["up"]))
        x = x + F.linear(hidden, tensors["down"])
        logits = F.linear(F.layer_norm(x, (width,)), tensors["embedding"])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
