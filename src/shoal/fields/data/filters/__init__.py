"""filters: rules that say which documents, and which of their lines, are text for a model.

Start reading at ``protocols.py``, then ``gopher_quality.py``. ``method.py`` is the method
``filters`` of the job ``curate``, which applies them one after the other.
"""

from shoal.core.parts import PartTable

__all__ = ["TEXT_FILTERS"]

TEXT_FILTERS = PartTable(
    "text_filter",
    {
        "gopher_quality": "shoal.fields.data.filters.gopher_quality:GopherQuality",
        "gopher_repetition": "shoal.fields.data.filters.gopher_repetition:GopherRepetition",
        "c4": "shoal.fields.data.filters.c4:CleanCrawl",
        "fineweb": "shoal.fields.data.filters.fineweb:FineWeb",
        "language": "shoal.fields.data.filters.language:TextLanguage",
        "pii": "shoal.fields.data.filters.pii:PersonalData",
        "decontaminate": "shoal.fields.data.filters.decontaminate:Decontaminate",
        "length": "shoal.fields.data.filters.length:TextLength",
    },
    about=(
        "A rule that drops documents, or changes their text. Chosen by the key `filters` of the "
        "method `filters` of a job with `job: curate`; they apply in their order."
    ),
    protocol="shoal.fields.data.filters.protocols:TextFilter",
)
