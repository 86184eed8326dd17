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
    about=(
        "Which tokens of a masked-diffusion model are unmasked in an iteration. Chosen by "
        "`decode.unmask` of a serving job with `decode` diffusion."
    ),
    protocol="shoal.serve.decode.diffusion.protocols:Unmask",
)

REFRESHES = PartTable(
    "refresh",
    {
        "none": f"{_HERE}.refresh.none:NoCache",
        "prefix": f"{_HERE}.refresh.prefix:PrefixRefresh",
        "dual": f"{_HERE}.refresh.dual:DualRefresh",
        "vicinity": f"{_HERE}.refresh.vicinity:VicinityRefresh",
    },
    about=(
        "What an iteration of diffusion recomputes, and what it reads from the cache. "
        "Chosen by `decode.refresh` of a serving job with `decode` diffusion."
    ),
    protocol="shoal.serve.decode.diffusion.protocols:Refresh",
)

ITERATIONS = PartTable(
    "iteration",
    {
        "hard": f"{_HERE}.iteration.hard:Hard",
        "smooth": f"{_HERE}.iteration.smooth:Smooth",
    },
    about=(
        "The input of a masked-diffusion model at masked positions. Chosen by `decode.iteration` "
        "of a serving job with `decode` diffusion."
    ),
    protocol="shoal.serve.decode.diffusion.protocols:Iteration",
)
