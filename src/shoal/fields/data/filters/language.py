"""Language: keep documents of some languages, as the package lingua identifies them."""

from __future__ import annotations

import functools
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le, MinLen

from shoal.core.errors import ConfigError
from shoal.core.extras import import_extra
from shoal.core.parts import part
from shoal.fields.data.curate.protocols import CurateWork
from shoal.fields.data.filters.costs import filter_estimate
from shoal.fields.data.filters.protocols import FilterBatch, FilterVerdict
from shoal.ir import Estimate, Machine

# The models of trigrams of all languages.
_MODELS = 3e8


@part
class TextLanguage:
    """Drop documents that are not in these languages.

    Args:
        languages: ISO 639-1 codes of those that are kept, such as ``en``.
        among: codes of the languages to choose from; empty for all 75 of the package. Fewer
            are quicker, and more certain where no other occurs.
        min_confidence: least probability of a kept language, of all to choose from.
        chars: most characters of a document that are looked at.
    """

    reasons: ClassVar = ("another language", "not certain")

    languages: Annotated[tuple[str, ...], MinLen(1)] = ("en",)
    among: tuple[str, ...] = ()
    min_confidence: Annotated[float, Ge(0), Le(1)] = 0.65
    chars: Annotated[int, Ge(1)] = 1000

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """Some of the characters of each document, one by one."""
        return filter_estimate(work, machine, 2e-7, held=_MODELS)

    def judge(self, batch: FilterBatch) -> FilterVerdict:
        """By the probabilities of the languages."""
        detector = _detector(tuple(sorted({*self.languages, *self.among} if self.among else ())))
        wanted = {_language(code) for code in self.languages}
        broken = np.full(len(batch.texts), -1, np.int64)
        for at in np.flatnonzero(batch.alive).tolist():
            text = batch.texts[at].as_py()[: self.chars]
            first, *_ = values = detector.compute_language_confidence_values(text)
            if first.language not in wanted or not first.value:
                broken[at] = 0
            elif sum(one.value for one in values if one.language in wanted) < self.min_confidence:
                broken[at] = 1
        return FilterVerdict(broken)


@functools.cache
def _codes() -> dict[str, Any]:
    lingua = import_extra("lingua", extra="fields", purpose="identifying languages")
    return {one.iso_code_639_1.name.lower(): one for one in lingua.Language.all()}


def _language(code: str) -> Any:
    if code not in _codes():
        raise ConfigError(
            f"text_filter.language.languages = {code!r}: expected ISO 639-1 codes, of "
            f"{', '.join(sorted(_codes()))}"
        )
    return _codes()[code]


@functools.cache
def _detector(among: tuple[str, ...]) -> Any:
    lingua = import_extra("lingua", extra="fields", purpose="identifying languages")
    chosen = [_language(code) for code in among] or list(_codes().values())
    builder = lingua.LanguageDetectorBuilder.from_languages(*chosen)
    return builder.with_low_accuracy_mode().with_preloaded_language_models().build()
