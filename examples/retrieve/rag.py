"""Answer a question from documents, with sources. `python rag.py MODEL_DIR FOLDER QUESTION`."""

import sys
import tempfile
from pathlib import Path

import httpx2

import shoal
from shoal.fields.retrieve.search import EMBEDDERS, SearchOptions, running_search

LONGEST = 400  # characters of a passage


def passages(folder):
    """Paragraphs of the Markdown and text files below a folder, each with its source."""
    for path in sorted(Path(folder).rglob("*")):
        if path.suffix in (".md", ".txt", ".rst"):
            for number, text in enumerate(path.read_text("utf-8").split("\n\n"), 1):
                if any(letter.isalnum() for letter in text):
                    source = f"{path.relative_to(folder)}, paragraph {number}"
                    yield {"text": text.strip()[:LONGEST], "source": source}


def main(model, folder, question, *, k=3, max_tokens=64):
    """The answer of a model that sees the passages that fit best, and where these are from."""
    with (
        tempfile.TemporaryDirectory() as directory,
        shoal.serve(model) as server,  # makes both the vectors and the answer
        httpx2.Client(timeout=120) as http,
    ):
        choice = {"name": "embeddings_api", "url": server.url, "model": server.model}
        embedder = EMBEDDERS.build(choice)
        dim = embedder.embed([question]).shape[1]
        options = SearchOptions(directory=Path(directory), embedder=embedder, port=0)
        with running_search(options) as url:
            docs = f"{url}/collections/docs"
            http.put(docs, json={"vectors": {"size": dim}}).raise_for_status()
            points = [{"id": at, "payload": one} for at, one in enumerate(passages(folder))]
            for begin in range(0, len(points), 100):
                body = {"points": points[begin : begin + 100]}
                http.put(f"{docs}/points", json=body).raise_for_status()
            query = {"query": {"text": question}, "using": "hybrid", "limit": k}
            found = http.post(f"{docs}/points/query", json={**query, "with_payload": True})
            hits = [one["payload"] for one in found.raise_for_status().json()["result"]["points"]]
        context = "\n\n".join(f"[{n}] {one['text']}" for n, one in enumerate(hits, 1))
        prompt = f"{context}\n\nQuestion: {question}\nAnswer from the passages:"
        body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens}
        said = http.post(f"{server.url}/v1/completions", json={**body, "temperature": 0})
        answer = said.raise_for_status().json()["choices"][0]["text"]
    return answer, [one["source"] for one in hits]


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    answer, sources = main(*sys.argv[1:])
    print(answer.strip())
    for number, source in enumerate(sources, 1):
        print(f"[{number}] {source}")
