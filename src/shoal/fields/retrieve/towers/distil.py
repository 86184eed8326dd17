"""Stage 2: a small query tower learns the vectors of the large one; documents stay as they are.

Source: Huang et al., ScalingNote, 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.core.random import Permutation
from shoal.corpora import tokenizer as tokenizers
from shoal.fields.retrieve.towers.contrastive import updates
from shoal.fields.retrieve.towers.protocols import Tick, TowerError, TowerTask
from shoal.fields.retrieve.towers.shapes import backbone_directory, config_of
from shoal.fields.retrieve.towers.tower import TextTower, products
from shoal.model import huggingface
from shoal.model.initialise import init_weights
from shoal.model.transformer import Transformer


def distillation_loss(student_BD: Tensor, teacher_BD: Tensor, weight: float) -> Tensor:
    """``MSE + weight * (1 - cos)``, mean over queries.

    The squared error is summed over the numbers of a vector: its mean would vanish as they grow.

    Args:
        student_BD: of length 1.
        teacher_BD: of length 1.
        weight: of the angle.
    """
    apart = (student_BD - teacher_BD).square().sum(-1)
    cosine = torch.nn.functional.cosine_similarity(student_BD, teacher_BD)
    return (apart + weight * (1 - cosine)).mean()


def student_of(
    task: TowerTask,
    teacher: TextTower,
    *,
    linear_map: bool = True,
    retokenise: bool = False,
) -> TextTower:
    """A small query tower with vectors of the teacher's dimension.

    One of the teacher's width begins as the teacher's layers, chosen evenly, whole where it has as
    many; a narrower one begins with the teacher's embedding, mapped, in those directions that tell
    tokens apart best, and a map back; where it is narrower than the vectors too, states behind all
    of its layers are mapped.

    Args:
        task: backbone of the student.
        teacher: the large query tower.
        linear_map: the student may have another width, and then has a map to the dimension.
        retokenise: the student may have another tokenizer; queries are split anew for it.

    Raises:
        TowerError: another width without a map, or another tokenizer without leave.
    """
    directory = backbone_directory(task.small)
    big = teacher.backbone.config
    own = task.model_copy(update={"vocab": big.vocab_size})
    config = config_of(own, task.small)
    settings = teacher.settings
    dim = teacher.settings.dim
    if config.hidden != dim and not linear_map:
        raise TowerError(
            f"small = {task.small}: a student of width {config.hidden} and a teacher of {dim} "
            "numbers: expected equal dimensions, or linear_map = true"
        )
    if config.hidden < dim:
        # A map of fewer numbers could reach a part of the space alone.
        settings = settings.model_copy(update={"pooling": "layers"})
    if directory is not None:
        tokenizer = tokenizers.load(directory)
        if tokenizer.get_vocab() != teacher.tokenizer.get_vocab() and not retokenise:
            raise TowerError(
                f"small = {task.small}: its tokenizer is not the teacher's; expected the same, or "
                "retokenise = true"
            )
        backbone = huggingface.read(directory, torch.float32, packed=False)
        return TextTower(backbone, tokenizer, settings)
    backbone = Transformer(config)
    init_weights(backbone, task.seed)
    student = TextTower(backbone, teacher.tokenizer, settings)
    with torch.no_grad():
        same = student.head.weight.shape == teacher.head.weight.shape
        if config.hidden == big.hidden and config.num_layers <= big.num_layers and same:
            _copied(student, teacher)
        elif config.hidden < big.hidden:
            _projected(student, teacher)
    return student


def _copied(student: TextTower, teacher: TextTower) -> None:
    """The teacher's layers, evenly chosen, first and last among them."""
    ours, theirs = student.backbone, teacher.backbone
    chosen = np.linspace(0, len(theirs.blocks) - 1, len(ours.blocks)).round().astype(int)
    for block, at in zip(ours.blocks, chosen, strict=True):
        block.load_state_dict(theirs.blocks[int(at)].state_dict())
    ours.embed.load_state_dict(theirs.embed.state_dict())
    ours.norm.load_state_dict(theirs.norm.state_dict())
    student.head.load_state_dict(teacher.head.state_dict())


def _projected(student: TextTower, teacher: TextTower) -> None:
    """The principal directions of what the teacher's map makes of its embedding."""
    rows = teacher.backbone.embed.weight
    if teacher.head.in_features == rows.shape[1]:
        rows = rows @ teacher.head.weight.T
    _, _, directions = torch.linalg.svd(rows, full_matrices=False)
    some = directions[: student.backbone.config.hidden]
    narrow = rows @ some.T
    embed, head = student.backbone.embed.weight, student.head.weight
    # As large as a fresh tower's.
    embed[:, : len(some)] = narrow / narrow.square().mean().sqrt()
    if len(directions[0]) == len(head):
        head[:, : len(some)] = some.T


def distil_query(
    task: TowerTask,
    teacher: TextTower,
    queries: Sequence[str],
    student: TextTower,
    tick: Tick,
    *,
    weight: float = 1.0,
    epochs: int = 8,
    lr: float = 1e-2,
    batch: int = 256,
) -> TextTower:
    """Train a student on queries alone; teacher and documents are not touched.

    Args:
        task: precision and seed.
        teacher: whose vectors are learned.
        queries: texts, no document and no label; none that is to be judged by.
        student: is trained and returned.
        tick: called with the share that is done.
        weight: of the angle in the loss.
        epochs: passes over the queries.
        lr: peak learning rate at width 128.
        batch: queries of a step.
    """
    goals = torch.from_numpy(teacher.encode(queries, task.precision))
    rows = student.tokens(queries)
    update = updates(student.train(), lr)
    batch = min(batch, len(rows))
    steps = len(rows) // batch
    for epoch in range(epochs):
        order = Permutation(len(rows), task.seed, epoch)(np.arange(len(rows)))
        for step in range(steps):
            some = order[step * batch : (step + 1) * batch]
            with products(task.precision):
                vectors = student([rows[at] for at in some])
            loss = distillation_loss(vectors, goals[some], weight)
            loss.backward()  # type: ignore[no-untyped-call]
            done = epoch * steps + step
            update(done / (epochs * steps))
            tick((done + 1) / (epochs * steps), f"queries, loss {float(loss.detach()):.3f}")
    return student.eval()


def error_bounds(student_QD: np.ndarray, teacher_QD: np.ndarray) -> np.ndarray:
    """Most by which the score of any document of length 1 differs, of each query, float64 [Q].

    By Cauchy and Schwarz, ``|<q_s - q_t, d>| <= ||q_s - q_t||``.

    Args:
        student_QD: vectors of queries.
        teacher_QD: the same queries' of the teacher.
    """
    gaps = np.asarray(student_QD, np.float64) - np.asarray(teacher_QD, np.float64)
    return np.asarray(np.linalg.norm(gaps, axis=1))


def unchanged(
    student_QD: np.ndarray, teacher_QD: np.ndarray, documents_ND: np.ndarray, k: int
) -> np.ndarray:
    """Queries whose k best documents are surely those of the teacher, bool [Q].

    A document's score moves by at most the bound; where the teacher's gap between ranks k and
    k + 1 exceeds twice the bound, no document can change sides.

    Args:
        student_QD: vectors of queries.
        teacher_QD: the same queries' of the teacher.
        documents_ND: of length 1, more than ``k``.
        k: documents of an answer.

    Raises:
        TowerError: there are no more than ``k`` documents.
    """
    if not 0 < k < len(documents_ND):
        raise TowerError(f"k = {k}: expected 1 to {len(documents_ND) - 1}, fewer than documents")
    teacher = np.asarray(teacher_QD, np.float64) @ np.asarray(documents_ND, np.float64).T
    best = -np.partition(-teacher, (k - 1, k), axis=1)
    # Lengths are 1 but for rounding.
    longest = float(np.linalg.norm(documents_ND.astype(np.float64), axis=1).max())
    moved = 2 * longest * error_bounds(student_QD, teacher_QD)
    return np.asarray(best[:, k - 1] - best[:, k] > moved)
