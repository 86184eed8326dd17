"""Personal data: e-mail and IP addresses, telephone and card numbers are replaced by their kind.

Source: the e-mail and IP rules follow those of Penedo et al., The FineWeb Datasets, 2024, section
3.7; the check digit of card numbers is Luhn's, US patent 2,950,048, 1960.

Rules find most of them and no names; text that only looks like one of them is replaced too.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from shoal.core.parts import part
from shoal.fields.data.curate.protocols import CurateWork
from shoal.fields.data.filters.costs import filter_estimate
from shoal.fields.data.filters.protocols import FilterBatch, FilterVerdict
from shoal.fields.data.filters.statistics import Columns, Ints, spans
from shoal.fields.data.readers import arrow
from shoal.ir import Estimate, Machine


class _Pattern(NamedTuple):
    """One kind of personal data.

    Args:
        kind: as it is counted; in capitals between angle brackets it is the replacement.
        part: which of :func:`~shoal.fields.data.filters.statistics.spans` may have it.
        before: what may not stand before it, one byte, in the syntax of ``re``.
        body: what is replaced.
        after: what may not stand behind it, two bytes at most.
    """

    kind: str
    part: int
    before: str
    body: str
    after: str

    def exact(self) -> re.Pattern[bytes]:
        """What is replaced. No pattern here takes longer than the text is long."""
        whole = f"(?<![{self.before}]){self.body}(?!{self.after})"
        return re.compile(whole.encode(), re.IGNORECASE)


def luhn(number: str) -> bool:
    """Whether the last digit is the check digit of the others."""
    digits = [int(one) for one in reversed(number) if one.isdigit()]
    doubled = (sum(divmod(2 * digit, 10)) for digit in digits[1::2])
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


@functools.lru_cache(2**14)  # texts have few addresses, and each many times
def _is_address(text: str, public: bool) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return address.is_global or not public


_EMAIL = _Pattern(
    "email",
    1,
    r"\w.%+-",
    r"[a-z0-9_%+-][a-z0-9._%+-]{0,63}@(?:[a-z0-9-]{1,63}\.){1,8}[a-z]{2,24}",
    r"[\w-]",
)
_CARD = _Pattern("card", 2, r"\d.+-", "[2-6](?:[ -]?[0-9]){12,18}", r"\d|[.-]\d")
_IPV4 = _Pattern("ip", 4, r"\w.", r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}", r"\w|\.\d")
_IPV6 = _Pattern("ip", 8, r"\w:.", "[0-9a-f]{1,4}(?:::?[0-9a-f]{1,4}){3,7}", r"[\w:]")
_PHONE = _Pattern(
    "phone",
    16,
    r"\w+.-",
    r"(?:\+[0-9]{1,3}[ .-]?(?:\([0-9]{1,4}\)[ .-]?)?[0-9](?:[ .-]?[0-9]){5,11}"
    r"|(?:\([0-9]{3}\) ?|[0-9]{3}[ .-])[0-9]{3}[ .-][0-9]{4})",
    r"\w|[.-]\d",
)


# Between parts that are searched together: nothing that stands in any pattern.
_BETWEEN = b"\n\n\n"


@part
class PersonalData:
    """Replace e-mail and IP addresses, telephone and card numbers; no document is dropped.

    Args:
        emails: replace e-mail addresses.
        cards: replace numbers of payment cards: 13 to 19 digits with a valid check digit.
        ips: replace IP addresses.
        phones: replace telephone numbers: international with ``+``, or of North America.
        public_only: of IP addresses only those of the public network.
    """

    reasons: ClassVar = ()

    emails: bool = True
    cards: bool = True
    ips: bool = True
    phones: bool = True
    public_only: bool = True

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """A search for each kind, and the replacements."""
        return filter_estimate(work, machine, 1.2e-9)

    def judge(self, batch: FilterBatch) -> FilterVerdict:
        """Find texts that may have some, and replace in these."""
        columns = batch.columns()
        changed: dict[int, bytes] = {}
        counts: dict[str, int] = {}
        # Texts as one of the patterns left them, their parts, and which rows they are of.
        layers = [(columns, spans(columns), np.arange(columns.num))]
        for pattern, valid in self._patterns():
            now: dict[int, bytes] = {}
            for among, parts, rows in layers:
                for at, matches in _matches(among, parts, pattern, valid).items():
                    now[int(rows[at])] = _replaced(among, at, matches, pattern.kind)
                    counts[pattern.kind] = counts.get(pattern.kind, 0) + len(matches)
            if now:
                gone = list(now)
                layers = [
                    (among, parts[~np.isin(rows[parts[:, 0]], gone)], rows)
                    for among, parts, rows in layers
                ]
                again = _columns_of([*now.values()])
                layers.append((again, spans(again), np.array(gone)))
                changed |= now
        texts = None
        if changed:
            pa, mask = arrow(), np.zeros(len(batch.texts), bool)
            places = sorted(changed)
            mask[places] = True
            new = pa.array([changed[at] for at in places], pa.large_binary())
            texts = arrow("compute").replace_with_mask(
                batch.texts, pa.array(mask), new.view(pa.large_string())
            )
        return FilterVerdict(np.full(len(batch.texts), -1, np.int64), texts, counts)

    def _patterns(self) -> Iterator[tuple[_Pattern, Callable[[str], bool]]]:
        """What is looked for, with what says whether a match is one."""
        if self.emails:
            yield _EMAIL, lambda text: True
        if self.cards:
            yield _CARD, luhn
        if self.ips:
            valid = functools.partial(_is_address, public=self.public_only)
            yield from ((pattern, valid) for pattern in (_IPV4, _IPV6))
        if self.phones:
            yield _PHONE, lambda text: True


def _columns_of(texts: Sequence[bytes]) -> Columns:
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return Columns(
        np.frombuffer(b"".join(texts) or b"\0", np.uint8), offsets, np.ones(len(texts), np.uint8)
    )


def _matches(
    texts: Columns, parts: Ints, pattern: _Pattern, valid: Callable[[str], bool]
) -> dict[int, list[tuple[int, int]]]:
    """Document -> (first byte, byte behind the last) of what is replaced, found in some parts."""
    parts = parts[(parts[:, 3] & pattern.part) > 0]
    # All parts as one text, so that there is one search.
    begins = texts.offsets[parts[:, 0]] + parts[:, 1]
    ends = texts.offsets[parts[:, 0]] + parts[:, 2]
    data = texts.data.data
    places = zip(begins.tolist(), ends.tolist(), strict=True)
    joined = _BETWEEN.join([data[begin:end] for begin, end in places])
    starts = np.cumsum(ends - begins + len(_BETWEEN)) - (ends - begins + len(_BETWEEN))
    matches = [one.span() for one in pattern.exact().finditer(joined) if valid(one[0].decode())]
    part_of = np.searchsorted(starts, [begin for begin, _ in matches], "right") - 1
    shifts = (parts[part_of, 1] - starts[part_of]).tolist()
    found: dict[int, list[tuple[int, int]]] = {}
    for (begin, end), row, shift in zip(matches, parts[part_of, 0].tolist(), shifts, strict=True):
        found.setdefault(row, []).append((begin + shift, end + shift))
    return found


def _replaced(texts: Columns, at: int, matches: Sequence[tuple[int, int]], kind: str) -> bytes:
    text = texts.data[texts.offsets[at] : texts.offsets[at + 1]].tobytes()
    pieces, after = [], 0
    for begin, end in matches:
        pieces += [text[after:begin], f"<{kind.upper()}>".encode()]
        after = end
    return b"".join([*pieces, text[after:]])
