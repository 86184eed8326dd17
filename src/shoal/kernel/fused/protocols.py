"""What a fused operator of training is made of: a pass forward, and one back.

Shapes: B sequences, T tokens, N numbers of a row, F ffn_hidden, H query heads, K key/value
heads, d head_dim, C = d / 2 pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class OperatorPasses(NamedTuple):
    """Both passes of an operator; :mod:`shoal.kernel.fused.autograd` makes a function of them.

    ===========  ===========================================  ==================================
    operator     forward                                      backward
    ===========  ===========================================  ==================================
    ``rms_norm`` (x[..., N], weight[N]) -> y                  (dy, x, weight) -> dx, dweight
    ``swiglu``   (x[..., 2F]) -> y[..., F]                    (dy, x) -> dx
    ``rope``     (qkv[B, T, H + 2K, d], cos[T, C], sin[T, C], (dq, dk, dv, qkv, cos, sin, q_norm,
                 q_norm[d] or None, k_norm[d] or None) ->     k_norm) -> dqkv, dq_norm, dk_norm;
                 q[B, T, H, d], k, v[B, T, K, d]              qkv is None where there are no norms
    ===========  ===========================================  ==================================

    Inputs stay as they are, results have their dtype, and gradients of weights are fp32.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
