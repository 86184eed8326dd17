"""Templates of logs as a transformer of scikit-learn: ``LogTemplates``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.fields.data.logs.formats import GENERAL, check_masks
from shoal.fields.data.logs.reading import binary_column, masked


class LogTemplates(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    r"""Counts of log templates in texts of one or several lines.

    Args:
        parser: a part of kind ``log_parser``: its name, or a mapping with ``name`` and options.
        masks: regular expressions of RE2 that are replaced by ``<*>`` before; None for general
            ones.

    Attributes:
        templates_: text of each template.

    A line that ``transform`` sees and that is of no template is not counted.
    """

    def __init__(
        self,
        parser: str | Mapping[str, Any] = "drain",
        *,
        masks: Iterable[str] | None = None,
    ) -> None:
        self.parser = parser
        self.masks = masks

    def fit(self, raw_documents: Iterable[str | bytes], y: Any = None) -> Self:
        """Find templates.

        Args:
            raw_documents: texts, each of one or several lines.
            y: not used.

        Raises:
            ConfigError: a parser or mask that there is not; or one text in the place of several.
            DataError: what is neither text nor bytes.
        """
        self.fit_transform(raw_documents)
        return self

    def fit_transform(self, raw_documents: Iterable[str | bytes], y: Any = None) -> Any:
        """Find templates, and count them; sparse int64 [texts, templates]."""
        lines, owners, texts = _lines(raw_documents)
        masks = self._masks()
        miner = table("log_parser").build(self.parser, where="parser").open()
        clean = masked(lines, masks)
        groups = miner.add(clean)
        mined = miner.finish()
        ids = mined.ids[groups] if len(groups) else groups
        self.templates_ = [one.decode("utf-8", "replace") for one in mined.templates]
        # The same masked line is of the same template, also when it comes again.
        self._known = dict(
            zip((b" ".join(one.split()) for one in clean.to_pylist()), ids.tolist(), strict=True)
        )
        self._patterns = [one.split() for one in mined.templates]
        return self._counts(ids, owners, texts)

    def transform(self, raw_documents: Iterable[str | bytes]) -> Any:
        """Count the templates of ``fit``; sparse int64 [texts, templates].

        Args:
            raw_documents: texts, each of one or several lines.
        """
        check_is_fitted(self, "templates_")
        lines, owners, texts = _lines(raw_documents)
        known = dict(self._known)
        ids = []
        for line in masked(lines, self._masks()).to_pylist():
            key = b" ".join(line.split())
            if key not in known:
                known[key] = self._matching(key.split())
            ids.append(known[key])
        found = np.array(ids, np.int64)
        good = found >= 0
        return self._counts(found[good], owners[good], texts)

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """The templates, as an array of objects."""
        check_is_fitted(self, "templates_")
        return np.asarray(self.templates_, dtype=object)

    def _masks(self) -> tuple[str, ...]:
        masks = GENERAL if self.masks is None else tuple(self.masks)
        check_masks(masks)
        return masks

    def _matching(self, tokens: list[bytes]) -> int:
        """The template with the most equal tokens of those that fit; -1 where none does."""
        best, most = -1, -1
        for at, pattern in enumerate(self._patterns):
            if len(pattern) == len(tokens) and all(
                a in (b, b"<*>") for a, b in zip(pattern, tokens, strict=True)
            ):
                equal = sum(a != b"<*>" for a in pattern)
                if equal > most:
                    best, most = at, equal
        return best

    def _counts(self, ids: Any, owners: Any, texts: int) -> Any:
        shape = texts, len(self.templates_)
        return sparse.csr_array((np.ones(len(ids), np.int64), (owners, ids)), shape=shape)

    def __sklearn_tags__(self) -> Any:
        """Texts, not arrays."""
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.two_d_array = False
        return tags


def _lines(documents: Iterable[str | bytes]) -> tuple[Any, Any, int]:
    """Lines of texts as Arrow has them, the text of each, and how many texts there are."""
    if isinstance(documents, str | bytes):
        raise ConfigError("raw_documents: one text; give a list of them")
    lines: list[bytes | str] = []
    owners: list[int] = []
    texts = 0
    for at, document in enumerate(documents):
        texts = at + 1
        some: list[Any] = [document]
        if hasattr(document, "splitlines"):  # what is neither text nor bytes is refused below
            some = [one for one in document.splitlines() if one.strip()]
        lines += some
        owners += [at] * len(some)
    return binary_column(lines), np.array(owners, np.int64), texts
