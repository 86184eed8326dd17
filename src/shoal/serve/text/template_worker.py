"""The process in which chat templates are rendered; see :mod:`shoal.serve.text.confined`.

``python -m shoal.serve.text.template_worker`` answers messages and the source of a template with
the prompt, or with what is wrong.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from shoal.core.errors import ShoalError
from shoal.corpora.chat.template import PLAIN, ChatTemplate
from shoal.serve.engine.frames import encode
from shoal.serve.text.confined import answer_all

MEMORY_BYTES = 256 * 2**20

# A process has one template, unless it is a test's.
_compiled = functools.lru_cache(1)(ChatTemplate)


def main() -> int:
    """Answer until the input ends."""
    first = {"source": PLAIN, "where": "", "names": {}, "messages": []}
    return answer_all(_rendered, first, memory_bytes=MEMORY_BYTES)


def _rendered(question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        template = _compiled(question["source"], where=question["where"])
        answer = {"kind": "good", "text": template.render(question["messages"], question["names"])}
        encode(answer)  # half a character cannot be sent
    except (ShoalError, ValueError) as cause:
        return {"kind": "bad", "message": str(cause)[:1000].encode(errors="replace").decode()}
    return answer


if __name__ == "__main__":
    sys.exit(main())
