"""vi: saddle points and other variational inequalities, with compressed messages.

Start reading at ``protocols.py``, then ``methods/masha1.py``, ``ends.py`` and ``execute.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable

if TYPE_CHECKING:
    from shoal.fields.federate.vi.solving import ViSolution

__all__ = ["VI_METHODS", "VI_PROBLEMS", "solve"]

VI_PROBLEMS = PartTable(
    "vi_problem",
    {
        "quadratic_saddle": "shoal.fields.federate.vi.problems.quadratic:QuadraticSaddle",
        "robust_regression": "shoal.fields.federate.vi.problems.regression:RobustRegression",
        "adversarial_lm": "shoal.fields.federate.vi.problems.adversarial:AdversarialLm",
    },
    about=(
        "A saddle point or another variational inequality that workers solve together. Chosen by "
        "the key `problem` of a job with `job: solve_vi`."
    ),
    protocol="shoal.fields.federate.vi.protocols:ViProblem",
)

VI_METHODS = PartTable(
    "vi_method",
    {
        "extragradient": "shoal.fields.federate.vi.methods.extragradient:Extragradient",
        "masha1": "shoal.fields.federate.vi.methods.masha1:Masha1",
        "masha2": "shoal.fields.federate.vi.methods.masha2:Masha2",
        "compressed_extragradient": (
            "shoal.fields.federate.vi.methods.compressed_extragradient:CompressedExtragradient"
        ),
    },
    about=(
        "How workers and a server find a saddle point. Chosen by the key `method` of a job with "
        "`job: solve_vi`."
    ),
    protocol="shoal.fields.federate.vi.protocols:ViMethod",
)


def solve(problem: Any, **options: Any) -> ViSolution:
    """Solve a variational inequality; see :func:`shoal.fields.federate.vi.solving.solve_vi`."""
    from shoal.fields.federate.vi.solving import solve_vi

    return solve_vi(problem, **options)
