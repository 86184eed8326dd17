"""What the towers of the claim about ScalingNote learn, and what they find."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from shoal.core.scratch import scratch_directory
from shoal.fields.retrieve.towers.contrastive import info_nce, train_pair
from shoal.fields.retrieve.towers.distil import distil_query, error_bounds, student_of, unchanged
from shoal.fields.retrieve.towers.execute import ranks_of
from shoal.fields.retrieve.towers.pair import TowerPair, vectors_digest
from shoal.fields.retrieve.towers.pairs import PairSplit, normal, read_pairs, split_pairs
from shoal.fields.retrieve.towers.protocols import TextPairs, TowerTask
from shoal.fields.retrieve.towers.shapes import block_parameters, config_of
from shoal.fields.retrieve.towers.tower import TextTower, TowerSettings
from shoal.kernel.threads import torch_threads

SIZES = ("S", "M", "L")
# Documents of the index beside those of the queries that are held out.
_OTHERS, _K = 4000, 10
# How else the small pair learns; the best way is chosen by the queries that are for choosing.
_OTHER_WAYS: dict[str, dict[str, Any]] = {
    "S+S, 6 passes": {"epochs": 6},
    "S+S, all layers": {"epochs": 6, "pooling": "layers", "dim": 384},
}


def task_of(seed: int, **other: Any) -> TowerTask:
    """How towers of every size learn; chosen on pairs that are held out to choose by."""
    return TowerTask(**{"seed": seed, **other})


def tower_split(pairs: int, held: int, seed: int) -> PairSplit:
    """Pairs of this machine: what is learned from, chosen by and judged by."""
    return split_pairs(read_pairs(f"local:{pairs + 2 * held}", seed=seed), held)


def entropy(pair: TowerPair, part: TextPairs, task: TowerTask) -> float:
    """Contrastive entropy among the documents that are held out, in nats."""
    q = pair.encode_query(part.queries, precision=task.precision)
    d = pair.encode_document(part.documents, precision=task.precision)
    return float(info_nce(torch.from_numpy(q), torch.from_numpy(d), task.temperature))


def learned(
    size: str, count: int, split: PairSplit, task: TowerTask, say: Callable[[float, str], None]
) -> TowerPair:
    """Stage 1 on the first ``count`` pairs."""
    some = TextPairs(split.train.queries[:count], split.train.documents[:count])
    return train_pair(task, size, some, say)


def law_points(
    split: PairSplit, counts: Sequence[int], seed: int, threads: int, say: Callable[[str], None]
) -> Any:
    """Entropies of every size behind every number of pairs but the largest."""
    task, points = task_of(seed), []
    with torch_threads(threads):
        for count in counts:
            for size in SIZES:
                pair = learned(size, count, split, task, named(f"{size}, {count} pairs", say))
                points.append(point(size, count, entropy(pair, split.test, task)))
    return points


def named(name: str, say: Callable[[str], None]) -> Callable[[float, str], None]:
    """What training calls, with a name before its words."""
    return lambda done, text: say(f"{name}, {done:.0%}: {text}")


def point(size: str, count: int, value: float) -> dict[str, float]:
    """One point of the law; parameters are those of the layers of both towers."""
    model = 2.0 * block_parameters(config_of(TowerTask(), size))
    return {"model": model, "size": float(count), "value": value}


def main_runs(
    split: PairSplit, seed: int, threads: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """All pairs: every size, the small pair for longer, and the query tower that is distilled.

    Returns:
        Ranks of the right documents, entropies, seconds, and what must not change.
    """
    task, count = task_of(seed), len(split.train)
    out: dict[str, Any] = {"points": [], "seconds": {}, "valid": {}}
    others = split.train.documents[:_OTHERS]
    pairs: dict[str, TowerPair] = {}

    def timed(name: str, make: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        made = make()
        out["seconds"][name] = round(time.perf_counter() - begin, 1)
        return made

    def vectors(pair: TowerPair, part: TextPairs) -> np.ndarray:
        return pair.encode_document([*part.documents, *others], precision=task.precision)

    def hit(queries: np.ndarray, documents: np.ndarray) -> float:
        return float((ranks_of(queries, documents) < _K).mean())

    with torch_threads(threads):
        for size in SIZES:
            work = partial(learned, size, count, split, task, named(size, say))
            pairs[size] = timed(size, work)
            out["points"].append(point(size, count, entropy(pairs[size], split.test, task)))
        arms = {"S+S": pairs["S"]}
        for name, other in _OTHER_WAYS.items():
            own = task_of(seed, **other)
            arms[name] = timed(name, partial(learned, "S", count, split, own, named(name, say)))
        large = pairs["L"]
        index, chosen_by = vectors(large, split.test), vectors(large, split.valid)
        student = timed(
            "student", lambda: distilled(split, large.query, task, named("student", say))
        )
        for arm, pair in arms.items():
            q = pair.encode_query(split.valid.queries)
            out["valid"][arm] = hit(q, vectors(pair, split.valid))
        best = max(arms, key=lambda one: out["valid"][one])
        for arm, tower in (("L+L", large.query), ("S+L", student)):
            out["valid"][arm] = hit(tower.encode(split.valid.queries), chosen_by)
        teacher, shrunk = (t.encode(split.test.queries) for t in (large.query, student))
        small = arms[best].encode_query(split.test.queries)
        found = {
            "L+L": ranks_of(teacher, index),
            "S+L": ranks_of(shrunk, index),
            "S+S": ranks_of(small, vectors(arms[best], split.test)),
        }
        after = vectors(TowerPair(student, large.document, large.query), split.test)
    out |= {
        "chosen": best,
        "ranks": {name: ranks.tolist() for name, ranks in found.items()},
        "index": [vectors_digest(index), vectors_digest(after)],
        "violations": violations(shrunk, teacher, index),
        "surely_same": float(unchanged(shrunk, teacher, index, _K).mean()),
        "mean_bound": float(error_bounds(shrunk, teacher).mean()),
        "test_queries_learned": len(
            set(map(normal, split.test.queries))
            & set(map(normal, (*split.train.queries, *split.train.unlabelled)))
        ),
    }
    return out


def distilled(
    split: PairSplit, teacher: TextTower, task: TowerTask, say: Callable[[float, str], None]
) -> TextTower:
    """Stage 2 on every query that is not held out."""
    queries = [*split.train.queries, *split.train.unlabelled]
    return distil_query(task, teacher, queries, student_of(task, teacher), say)


def violations(
    student: np.ndarray, teacher: np.ndarray, documents: np.ndarray, *, bound: bool = True
) -> int:
    """Queries whose best documents changed though the theorem says that they cannot.

    Without the bound, of all queries.
    """
    sure = unchanged(student, teacher, documents, _K) if bound else np.ones(len(teacher), bool)
    best = [
        np.sort(np.argpartition(-(one @ documents.T), _K, axis=1)[:, :_K], axis=1)
        for one in (student[sure], teacher[sure])
    ]
    return int((best[0] != best[1]).any(1).sum())


def random_violations(queries: int, seed: int, *, bound: bool) -> int:
    """The same of random vectors, some of which move a little and some a lot."""
    rng = np.random.default_rng(seed)

    def unit(rows: np.ndarray) -> np.ndarray:
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)

    teacher, documents = (unit(rng.normal(size=(n, 16))) for n in (queries, 200))
    moved = rng.normal(size=teacher.shape) * 10 ** rng.uniform(-4, -1, (queries, 1))
    return violations(unit(teacher + moved), teacher, documents, bound=bound)


def copied_loss(seed: int, *, layers: int = 3) -> float:
    """Squared error of a student that has all layers of its teacher, or only some."""
    from shoal.corpora.tokenizer import train

    task = TowerTask(large="3x64", small=f"{layers}x64", vocab=300, precision="fp32", seed=seed)
    settings = TowerSettings(dim=64, length=16, prompt="", pooling="mean")
    teacher = TextTower.fresh(config_of(task, "3x64"), train(["one"], 300), settings, seed)
    texts = ["a first query", "another one", "the third"]
    gap = student_of(task, teacher.eval()).eval().encode(texts) - teacher.encode(texts)
    return float(np.square(gap).sum(1).mean())


def online_arms(split: PairSplit, seed: int, queries: int) -> dict[str, Callable[[], object]]:
    """Queries encoded one after the other: by the small tower, the large one, and transformers'.

    Times do not depend on what weights have learned, so these are fresh.
    """
    from transformers import LlamaModel

    from shoal.fields.retrieve.towers.contrastive import fresh_pair
    from shoal.model import huggingface

    task = task_of(seed)
    some = TextPairs(split.train.queries, split.train.documents)
    large = fresh_pair(task, "L", some).query.eval()
    small = student_of(task, large).eval()
    texts = split.test.queries[:queries]
    with scratch_directory("towers") as place:
        huggingface.write(place / "large", large.backbone)
        peer = LlamaModel.from_pretrained(place / "large").eval()

    @torch.inference_mode()
    def theirs() -> None:
        for text in texts:
            ids = torch.from_numpy(large.tokens([text])[0].astype(np.int64))[None]
            states = peer(input_ids=ids, use_cache=False).last_hidden_state
            torch.nn.functional.normalize(large.head(states.mean(1)), dim=-1).numpy()

    def ours(tower: TextTower) -> Callable[[], object]:
        return lambda: [tower.encode([text]) for text in texts]

    return {"small": ours(small), "large": ours(large), "peer": theirs}


def rank_gradients(comm: Any, batch: int, seed: int) -> list[float]:
    """What one rank of several has learned after two steps, as sums of its weights by name."""
    task = TowerTask(batch=batch, epochs=2, vocab=300, precision="fp32", seed=seed, lr=1e-3)
    rng = np.random.default_rng(seed)
    words = ["".join(chr(97 + one) for one in rng.integers(0, 26, 5)) for _ in range(60)]
    texts = [" ".join(rng.choice(words, 6)) for _ in range(2 * batch)]
    pair = train_pair(
        task, "2x64", TextPairs(texts[:batch], texts[batch:]), lambda done, text: None, comm
    )
    return pair.encode_query(texts[:8]).ravel().tolist()
