"""serve.decode: many tokens a step, the same tokens.

The life of a guess is in :mod:`~shoal.serve.decode.protocols`. The tables of those that
guess and of the rules by which guesses are accepted, of the other ways to decode, and of the
layouts of concurrent workers. Torch-free.
"""

from shoal.core.parts import PartTable

__all__ = ["ACCEPTANCES", "DECODES", "HOGWILD_LAYOUTS", "SPECULATORS"]

SPECULATORS = PartTable(
    "speculative",
    {
        "dovetail": "shoal.serve.decode.dovetail.part:DovetailSpeculative",
        "draft_model": "shoal.serve.decode.draft.part:DraftModel",
        "easyspec": "shoal.serve.decode.draft.easyspec:EasySpec",
        "falcon": "shoal.serve.decode.falcon.part:FalconSpeculative",
        "medusa": "shoal.serve.decode.heads.medusa:MedusaSpeculative",
        "ngram": "shoal.serve.decode.ngram:Ngram",
        "ppd": "shoal.serve.decode.heads.ppd:PpdSpeculative",
    },
    about=(
        "Speculative decoding: what proposes the tokens that the model verifies. Chosen by the key "
        "`speculative` of a serving job."
    ),
    protocol="shoal.serve.decode.protocols:Speculator",
)

ACCEPTANCES = PartTable(
    "accept",
    {
        "greedy": "shoal.serve.decode.accept.greedy:GreedyAcceptance",
        "rejection": "shoal.serve.decode.accept.rejection:Rejection",
        "sample_match": "shoal.serve.decode.accept.sample_match:SampleMatch",
        "typical": "shoal.serve.decode.accept.typical:Typical",
    },
    about=(
        "How draft tokens are accepted. Chosen by `accept` of a part of kind "
        "[speculative](#speculative)."
    ),
    protocol="shoal.serve.decode.protocols:Acceptance",
)

DECODES = PartTable(
    "decode",
    {
        "autoregressive": "shoal.serve.decode.autoregressive:Autoregressive",
        "diffusion": "shoal.serve.decode.diffusion.part:Diffusion",
        "hogwild": "shoal.serve.decode.hogwild.part:Hogwild",
    },
    about="How tokens are decoded from logits. Chosen by the key `decode` of a serving job.",
    protocol="shoal.serve.decode.protocols:DecodePart",
)

HOGWILD_LAYOUTS = PartTable(
    "hogwild_layout",
    {
        "contiguous": "shoal.serve.decode.hogwild.contiguous:ContiguousLayout",
        "interleaved": "shoal.serve.decode.hogwild.interleaved:InterleavedLayout",
        "combined": "shoal.serve.decode.hogwild.combined:CombinedLayout",
    },
    about=(
        "What a concurrent worker attends to, in which order. Chosen by `layout` of `decode: "
        "hogwild` in a serving job."
    ),
    protocol="shoal.serve.decode.hogwild.protocols:HogwildLayout",
)
