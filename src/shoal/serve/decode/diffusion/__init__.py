"""diffusion: from masks to text, many tokens a forward pass.

A block of masks is worked on in iterations: ``iteration`` says what the model sees where a mask
stands, ``refresh`` which tokens are computed again and which stand in the cache, and ``unmask``
which of the model's guesses are kept. ``runner`` is the loop, for several requests at once.

Source: Ma et al., dInfer: An Efficient Inference Framework for Diffusion Language Models, 2025.
"""

from shoal.core.parts import PartTable

__all__ = ["ITERATIONS", "REFRESHES", "UNMASKS"]

_HERE = "shoal.serve.decode.diffusion"

UNMASKS = PartTable(
    "unmask",
    {
        "fixed": f"{_HERE}.unmask.fixed:Fixed",
        "threshold": f"{_HERE}.unmask.threshold:Threshold",
        "factor": f"{_HERE}.unmask.factor:Factor",
        "hierarchical": f"{_HERE}.unmask.hierarchical:Hierarchical",
        "credit": f"{_HERE}.unmask.credit:Credit",
    },
)

REFRESHES = PartTable(
    "refresh",
    {
        "none": f"{_HERE}.refresh.none:NoCache",
        "prefix": f"{_HERE}.refresh.prefix:Prefix",
        "dual": f"{_HERE}.refresh.dual:Dual",
        "vicinity": f"{_HERE}.refresh.vicinity:Vicinity",
    },
)

ITERATIONS = PartTable(
    "iteration",
    {
        "hard": f"{_HERE}.iteration.hard:Hard",
        "smooth": f"{_HERE}.iteration.smooth:Smooth",
    },
)
