"""A deep graph network, and its layers with a backward pass that may use old gradients.

``h' = relu(s ((1 - b) I + b W))`` with ``s = (1 - a) P h + a h0``, P the normalised adjacency
matrix and ``b = log(theta / l + 1)`` in layer l.

Source: Chen et al., Simple and Deep Graph Convolutional Networks (GCNII), 2020.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from scipy.sparse import csr_matrix
from torch import Tensor, nn

ALPHA, THETA = 0.1, 0.5


def beta(layer: int) -> float:
    """How much the matrix of a layer counts; layers begin at 1."""
    return math.log(THETA / layer + 1)


def spread(matrix: csr_matrix, x: Tensor) -> Tensor:
    """``matrix @ x``, [n, d]."""
    product: Any = matrix @ x.detach().numpy()
    return torch.from_numpy(product)


class GCNII(nn.Module):
    """The parameters of the network, and its exact forward pass in one process.

    Args:
        features: numbers of a node's vector.
        hidden: numbers of a hidden one.
        classes: that nodes are assigned to.
        layers: convolutions.
    """

    def __init__(self, features: int, hidden: int, classes: int, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(features, hidden)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(hidden, hidden) / math.sqrt(hidden)) for _ in range(layers)
        )
        self.leave = nn.Linear(hidden, classes)

    @torch.no_grad()
    def forward(self, x: Tensor, matrix: csr_matrix) -> Tensor:
        """Scores of classes, [N, classes].

        Args:
            x: [N, features].
            matrix: the normalised adjacency matrix, [N, N].
        """
        h = h0 = torch.relu(self.enter(x))
        for layer, weight in enumerate(self.weights, 1):
            s = (1 - ALPHA) * spread(matrix, h) + ALPHA * h0
            h = torch.relu((1 - beta(layer)) * s + beta(layer) * s @ weight)
        scores: Tensor = self.leave(h)
        return scores


class StaleLayer:
    """A layer over the rows of a rank: vectors and gradients of every row, current or old.

    Both passes run under :func:`torch.no_grad`.

    Args:
        number: of the layer, from 1.
        weight: [d, d]; gradients are added to ``weight.grad``, which is there.
        own: rows of the rank.
        total: with those of others.

    Attributes:
        h: [total, d], what comes in.
        g: [total, d], gradient of ``P h``.
    """

    def __init__(self, number: int, weight: nn.Parameter, own: int, total: int) -> None:
        self.weight, self._b = weight, beta(number)
        width, dtype = weight.shape[0], weight.dtype
        self.h, self.g = (torch.zeros(total, width, dtype=dtype) for _ in range(2))
        self._s = torch.zeros(own, width, dtype=dtype)
        self._on = torch.zeros(own, width, dtype=torch.bool)

    def forward(self, rows: slice, matrix: csr_matrix, h0: Tensor) -> Tensor:
        """Vectors that go out, [n, d]; those that come in lie in ``h``.

        Args:
            rows: of the chunk.
            matrix: of their neighbours, [n, total].
            h0: [n, d], the first vectors of these rows.
        """
        s = spread(matrix, self.h).mul_(1 - ALPHA).add_(h0, alpha=ALPHA)
        z = torch.addmm(s, s, self.weight, beta=1 - self._b, alpha=self._b).relu_()
        self._s[rows], self._on[rows] = s, z > 0
        return z

    def backward(self, rows: slice, grad: Tensor) -> Tensor:
        """Gradient of the first vectors, [n, d]; that of ``P h`` is left in ``g``.

        Args:
            rows: of the chunk.
            grad: [n, d], of what goes out.
        """
        dz = grad * self._on[rows]
        assert self.weight.grad is not None
        self.weight.grad.addmm_(self._s[rows].T, dz, alpha=self._b)
        ds = torch.addmm(dz, dz, self.weight.T, beta=1 - self._b, alpha=self._b)
        self.g[rows] = ds * (1 - ALPHA)
        return ds.mul_(ALPHA)
