"""corpora: real text, its tokenizer, memory-mapped tokens, and the order they are read in.

The life of a corpus: a part of kind ``corpus`` yields documents
(:mod:`~shoal.corpora.protocols`), :mod:`~shoal.corpora.tokenizer` learns or loads the
vocabulary, :mod:`~shoal.corpora.tokens` writes shards once and maps them,
:mod:`~shoal.corpora.order` says which windows make up a step, a part of kind
``packing`` cuts them, and :mod:`~shoal.corpora.heldout` scores what was held out.

Importing this room loads neither torch nor any reader of a file format.
"""

from shoal.core.parts import PartTable

__all__ = ["CORPORA", "PACKINGS"]

CORPORA = PartTable(
    "corpus",
    {
        "stdlib": "shoal.corpora.stdlib:Stdlib",
        "text": "shoal.corpora.text:TextCorpus",
        "jsonl": "shoal.corpora.jsonl:JsonlCorpus",
        "parquet": "shoal.corpora.parquet:Parquet",
        "chat": "shoal.corpora.chat.corpus:ChatCorpus",
        "synthetic": "shoal.corpora.synthetic:Synthetic",
        "mixed": "shoal.corpora.mixed:MixedCorpus",
        "tasks": "shoal.corpora.tasks:Tasks",
    },
    about="The source of the training text. Chosen by the key `data` of a job.",
    protocol="shoal.corpora.protocols:Corpus",
)

PACKINGS = PartTable(
    "packing",
    {
        "stream": "shoal.corpora.packing.stream:StreamPacking",
        "document": "shoal.corpora.packing.document:DocumentMask",
        "padded": "shoal.corpora.packing.padded:PaddedPacking",
        "best_fit": "shoal.corpora.packing.best_fit:BestFit",
    },
    about="How documents fill sequences. Chosen by the key `packing` of a job.",
    protocol="shoal.corpora.protocols:Packing",
)
