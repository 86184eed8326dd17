"""Parallel algorithms: what is done, where, in what pieces and on whose memory, said apart.

::

    from shoal.kernel import algorithms as alg
    from shoal.kernel.algorithms import numa, par, static

    policy = par.on(numa).with_(static())
    a, b, c = (alg.allocate(n, policy=policy) for _ in range(3))
    alg.transform(policy, a, b, out=c, f="a + s*b", s=3.0)

Expressions are compiled into one loop per call, once per machine; threads are PyTorch's.

Source: Heller et al., Closing the Performance Gap with Modern C++, 2016 (HPX.Compute).
"""

from shoal.kernel.algorithms.elementwise import copy, fill, for_each, for_loop, transform
from shoal.kernel.algorithms.expression import CppExpression
from shoal.kernel.algorithms.memory import allocate
from shoal.kernel.algorithms.policy import (
    Policy,
    auto,
    block,
    deterministic,
    dynamic,
    fork_join,
    guided,
    inline,
    max_cores,
    numa,
    par,
    par_unseq,
    seq,
    static,
    task,
    work_stealing,
)

__all__ = [
    "CppExpression",
    "Policy",
    "allocate",
    "auto",
    "block",
    "copy",
    "deterministic",
    "dynamic",
    "fill",
    "for_each",
    "for_loop",
    "fork_join",
    "guided",
    "inline",
    "max_cores",
    "numa",
    "par",
    "par_unseq",
    "seq",
    "static",
    "task",
    "transform",
    "work_stealing",
]
