"""datatrove's filters on given documents: a JSON line in, one out, in a Python that has datatrove.

``{"texts": [...]}`` gives the documents; ``{"filter": NAME, "words": "own" | "spaces"}`` asks for
the verdicts: empty for a document that is kept, else why it is dropped. With ``spaces``, words are
what spaces separate, and not tokens of spaCy; marks that end a line are then those of Shoal too.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    fineweb_quality_filter,
    gopher_quality_filter,
    gopher_repetition_filter,
)

MAKERS: dict[str, Any] = {
    "gopher_quality": GopherQualityFilter,
    "gopher_repetition": GopherRepetitionFilter,
    "c4": C4QualityFilter,
    "fineweb": FineWebQualityFilter,
}
MODULES = (fineweb_quality_filter, gopher_quality_filter, gopher_repetition_filter)
OWN = {module: module.split_into_words for module in MODULES}


def judged(name: str, words: str, texts: list[str]) -> dict[str, Any]:
    """Verdicts, and the seconds that they took."""
    for module, own in OWN.items():
        module.split_into_words = own if words == "own" else lambda text, *_: text.split()
    options = {}
    if name == "fineweb" and words == "spaces":
        options["stop_chars"] = tuple(".!?\"'”’…。！？؟۔।")
    one = MAKERS[name](**options)
    one.filter(Document(text="Loads what it needs.", id="0"))
    documents = [Document(text=text, id=str(at)) for at, text in enumerate(texts)]
    verdicts = []
    begin = time.perf_counter()
    for document in documents:
        try:
            result = one.filter(document)
        except ZeroDivisionError:
            result = False, "fails: division by zero"
        verdicts.append("" if result is True else result[1] if result else "dropped")
    return {"seconds": time.perf_counter() - begin, "verdicts": verdicts}


def main() -> None:
    """Answer until the input ends."""
    texts: list[str] = []
    for line in sys.stdin:
        message = json.loads(line)
        if "texts" in message:
            texts = message["texts"]
            answer: dict[str, Any] = {}
        else:
            answer = judged(message["filter"], message["words"], texts)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
