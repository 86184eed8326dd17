"""serve.decode: many tokens a step, the same tokens.

The life of a guess is in :mod:`~shoal.serve.decode.protocols`. The door: the tables of those that
guess and of the rules by which guesses are accepted.
"""

from shoal.core.parts import PartTable

__all__ = ["ACCEPTANCES", "SPECULATORS"]

SPECULATORS = PartTable(
    "speculative",
    {
        "falcon": "shoal.serve.decode.falcon:Falcon",
        "medusa": "shoal.serve.decode.medusa:Medusa",
        "ngram": "shoal.serve.decode.ngram:Ngram",
        "ppd": "shoal.serve.decode.ppd:Ppd",
    },
)

ACCEPTANCES = PartTable(
    "accept",
    {
        "greedy": "shoal.serve.decode.accept.greedy:Greedy",
        "sample_match": "shoal.serve.decode.accept.sample_match:SampleMatch",
    },
)
