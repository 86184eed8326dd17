"""What HTTP/1.1 requests must not contain, though h11 lets it pass.

A proxy and a server that read such a request differently see two requests where there is one.
Refused are lines that end with a bare line feed, header lines that go on in the next line, chunk
sizes above 2^63 - 1, and a length beside chunks.

Source: RFC 9112, 2022, sections 2.2, 5.2, 6.3 and 7.1.
"""

from __future__ import annotations

import re

import h11
from h11._receivebuffer import ReceiveBuffer

_BARE = re.compile(rb"(?<!\r)\n")
_SIZE = re.compile(rb"[0-9A-Fa-f]*")
_MOST = 2**63 - 1
_FRAMING = (b"content-length", b"transfer-encoding")


class StrictBuffer(ReceiveBuffer):
    """The bytes that have come and are not parsed yet; takes the place of h11's own."""

    def __init__(self) -> None:
        super().__init__()
        self._checked = 0

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Header lines up to the blank one; None while it has not come.

        Raises:
            h11.LocalProtocolError: a line is not as it must be.
        """
        end = self._data.find(b"\r\n\r\n")
        self._refuse_bare(len(self._data) if end < 0 else end)
        lines = super().maybe_extract_lines()
        if lines is None:
            return None
        self._checked = 0
        if any(line.startswith((b" ", b"\t")) for line in lines):
            raise h11.LocalProtocolError("a header line that goes on in the next line")
        names = {bytes(line.partition(b":")[0]).lower() for line in lines}
        if names.issuperset(_FRAMING):
            raise h11.LocalProtocolError("a length beside chunks")
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """The line that begins a chunk; None while it has not come.

        Raises:
            h11.LocalProtocolError: it is not as it must be.
        """
        end = self._data.find(b"\r\n")
        self._refuse_bare(len(self._data) if end < 0 else end)
        line = super().maybe_extract_next_line()
        if line is not None:
            self._checked = 0
            size = _SIZE.match(line)
            if size is not None and int(size[0] or b"0", 16) > _MOST:
                raise h11.LocalProtocolError("a chunk size above 2^63 - 1")
        return line

    def _refuse_bare(self, end: int) -> None:
        if _BARE.search(self._data, self._checked, end):
            raise h11.LocalProtocolError("a bare line feed")
        self._checked = end
