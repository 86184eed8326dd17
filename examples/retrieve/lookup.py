"""Continue a text behind what a datastore knows. `python lookup.py MODEL_DIR FOLDER TEXT`."""

import sys
import tempfile
from pathlib import Path

import httpx2

import shoal
from shoal.fields.retrieve.datastore import build_datastore
from shoal.fields.retrieve.datastore.passages import text_files


def main(model, folder, text, *, pattern="*.md", k=3, max_tokens=64):
    """What the model says next, and the passages it saw: the best nearest to the text."""
    with tempfile.TemporaryDirectory() as directory:
        files = text_files(folder, pattern)
        store = build_datastore(Path(directory) / "store", files, passage_words=64)
        (passages,) = store.retrieve([text], k)
    prompt = "\n\n".join([*(one.text for one in reversed(passages)), text])
    with shoal.serve(model) as server, httpx2.Client(timeout=120) as http:
        body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens}
        said = http.post(f"{server.url}/v1/completions", json={**body, "temperature": 0})
        answer = said.raise_for_status().json()["choices"][0]["text"]
    return answer, [f"{one.file}, byte {one.offset}" for one in passages]


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    answer, places = main(*sys.argv[1:])
    print(answer.strip())
    print("\n".join(places))
