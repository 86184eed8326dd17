"""Personal data: e-mail and IP addresses, telephone and card numbers are replaced by their kind.

Source: the e-mail and IP rules follow those of Penedo et al., The FineWeb Datasets, 2024, section
3.7; the check digit of card numbers is Luhn's, US patent 2,950,048, 1960.

Rules find most of them and no names; text that only looks like one of them is replaced too.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

import numpy as np

from shoal.core.parts import part
from shoal.fields.data.curate.protocols import CurateWork
from shoal.fields.data.filters import statistics
from shoal.fields.data.filters.costs import filter_estimate
from shoal.fields.data.filters.protocols import FilterBatch, FilterVerdict
from shoal.fields.data.readers import arrow
from shoal.ir import Estimate, Machine


class _Pattern(NamedTuple):
    """One kind of personal data.

    Args:
        kind: as it is counted; in capitals between angle brackets it is the replacement.
        hint: of :func:`~shoal.fields.data.filters.statistics.hints`, without which no text has it.
        before: what may not stand before it, in the syntax of ``re``.
        body: what is replaced, in the syntax of ``re`` and of Arrow's RE2, which finds the texts.
        after: what may not stand behind it.
    """

    kind: str
    hint: int
    before: str
    body: str
    after: str

    def exact(self) -> re.Pattern[str]:
        """What is replaced. No pattern here takes longer than the text is long."""
        whole = f"(?<![{self.before}]){self.body}(?!{self.after})"
        return re.compile(whole, re.IGNORECASE | re.ASCII)


def luhn(number: str) -> bool:
    """Whether the last digit is the check digit of the others."""
    digits = [int(one) for one in reversed(number) if one.isdigit()]
    doubled = (sum(divmod(2 * digit, 10)) for digit in digits[1::2])
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


def _address(public: bool) -> Callable[[str], bool]:
    def valid(text: str) -> bool:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False
        return address.is_global or not public

    return valid


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
    2,
    r"\w+.-",
    r"(?:\+[0-9]{1,3}[ .-]?(?:\([0-9]{1,4}\)[ .-]?)?[0-9](?:[ .-]?[0-9]){5,11}"
    r"|(?:\([0-9]{3}\) ?|[0-9]{3}[ .-])[0-9]{3}[ .-][0-9]{4})",
    r"\w|[.-]\d",
)


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
        return filter_estimate(work, machine, 2e-8)

    def judge(self, batch: FilterBatch) -> FilterVerdict:
        """Find texts that may have some, and replace in these."""
        pa, hints = arrow(), statistics.hints(batch.columns())
        changed: dict[int, str] = {}
        counts: dict[str, int] = {}
        for pattern, valid in self._patterns():
            kind, exact = pattern.kind, pattern.exact()
            flagged = np.flatnonzero(hints & pattern.hint)
            some = batch.texts.take(pa.array(flagged))
            near = arrow("compute").match_substring_regex(some, pattern.body, ignore_case=True)
            replaced = 0

            def put(match: re.Match[str], kind: str = kind, valid: object = valid) -> str:
                nonlocal replaced
                if not valid(match[0]):  # type: ignore[operator]
                    return match[0]
                replaced += 1
                return f"<{kind.upper()}>"

            for at in flagged[near.to_numpy(zero_copy_only=False)].tolist():
                before = changed[at] if at in changed else batch.texts[at].as_py()
                after = exact.sub(put, before)
                if after != before:
                    changed[at] = after
            if replaced:
                counts[kind] = counts.get(kind, 0) + replaced
        texts = None
        if changed:
            mask = np.zeros(len(batch.texts), bool)
            places = sorted(changed)
            mask[places] = True
            texts = arrow("compute").replace_with_mask(
                batch.texts,
                pa.array(mask),
                pa.array([changed[at] for at in places], pa.large_string()),
            )
        return FilterVerdict(np.full(len(batch.texts), -1, np.int64), texts, counts)

    def _patterns(self) -> Iterator[tuple[_Pattern, Callable[[str], bool]]]:
        """What is looked for, with what says whether a match is one."""
        if self.emails:
            yield _EMAIL, lambda text: True
        if self.cards:
            yield _CARD, luhn
        if self.ips:
            yield from ((pattern, _address(self.public_only)) for pattern in (_IPV4, _IPV6))
        if self.phones:
            yield _PHONE, lambda text: True
