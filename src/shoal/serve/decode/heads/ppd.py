"""The model's own weights guess on behind embeddings that were learned for it.

Below every guess of a tree hang some prompt tokens, which no other row sees. Whichever guess is
accepted last, the outputs at its prompt tokens are the guesses of the next step: one pass both
verifies and drafts. What is kept for it are a few embeddings, and nothing in the cache: the rows
of prompt tokens are overwritten by the next step as those of wrong guesses are.

Shapes: m prompt tokens, E members of each, P prompt rows of a tree, D hidden, V vocabulary, W
guesses of a prompt token.

Source: Chen et al., Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of
LLM Inference, 2024, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from shoal.core.config import Kind
from shoal.core.errors import ConfigError, ModelError
from shoal.core.parts import Choice, part, table
from shoal.ir import MAX_NODES, DrafterCalibration, Expectation, ServeJob
from shoal.plan.trees.dynamic import DynamicTrees, StateTree
from shoal.plan.trees.hardware import Hardware
from shoal.serve.decode.protocols import (
    AcceptedTokens,
    Branches,
    Guess,
    Needs,
    PromptRows,
    TokenTree,
    branches,
)
from shoal.serve.decode.trained import KeptGuess, TrainedSpeculator

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.drafters.files import DrafterConfig
    from shoal.model.transformer import Transformer


@part
class PpdSpeculative(TrainedSpeculator):
    """Prompt tokens that were trained for the served model (``job: drafter``).

    Args:
        path: their directory.
        prompts: use only the first ones, this many; 0 for all.
        tree: order of the draft tokens of every depth; their number, and the number of prompt
            tokens below each, follow from the acceptance rates and the cost of rows.
        accept: how draft tokens are accepted.
    """

    path: str
    prompts: Annotated[int, Ge(0)] = 0
    tree: Annotated[Choice, Kind("tree")] = Choice(name="hardware")
    accept: Annotated[Choice, Kind("accept")] = Choice(name="sample_match")
    kind: ClassVar[str] = "ppd"

    def expects(self) -> Expectation:
        trees = self._trees(self.config())
        return Expectation(tokens=trees.expected(), reads=0)

    def drafter(self, job: ServeJob, model: Transformer) -> PpdDrafter:
        """See :class:`~shoal.serve.decode.protocols.Speculator`.

        Raises:
            ModelError: the drafter is of another kind, or was trained for another model.
            ConfigError: more prompt tokens than there are, or a tree that needs more.
        """
        config, state = self.stored(job)
        trees = self._trees(config)
        if job.max_step_tokens < trees.fewest:
            raise ConfigError(
                f"max_step_tokens = {job.max_step_tokens}: a token and {trees.prompts} prompt "
                f"tokens of {trees.ensemble} are {trees.fewest} rows; give more, or fewer prompts"
            )
        embeddings = state["embeddings"][: trees.prompts]
        if embeddings.shape[:2] != (trees.prompts, trees.ensemble):
            raise ModelError(
                f"{self.path}: {len(embeddings)} prompt tokens of {embeddings.shape[1]}, and its "
                f"config says {trees.prompts} of {trees.ensemble}; train it again"
            )
        weight = model.weight
        return PpdDrafter(
            embeddings.to(weight.device, weight.dtype), trees, model.config.vocab_size
        )

    def _trees(self, config: DrafterConfig) -> DynamicTrees:
        there = len(config.calibration)
        if there < 1:
            raise ModelError(f"{self.path}: no prompt token; train at least one")
        used = self.first("prompts", there, f"those in {self.path}")
        tree = table("tree").build(self.tree, where="speculative.ppd.tree")
        most = tree.rows if isinstance(tree, Hardware) else MAX_NODES + 1
        calibration = DrafterCalibration(config.calibration[:used])
        return DynamicTrees(calibration, tree, int(config.options.get("ensemble", 1)), most)


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """A tree before it has tokens.

    Args:
        level: of each candidate; ``rank`` beside it.
        shape: of root, candidates and prompt rows.
        asking: the prompt rows.
    """

    level: np.ndarray
    rank: np.ndarray
    shape: Branches
    asking: PromptRows


class PpdDrafter:
    """The drafter that :class:`PpdSpeculative` builds.

    Args:
        embeddings: [m, E, D] of the prompt tokens.
        trees: of every number of rows and of available predictions.
        vocab_size: V.
    """

    needs: ClassVar[Needs] = "nothing"

    def __init__(self, embeddings: Tensor, trees: DynamicTrees, vocab_size: int) -> None:
        from shoal.serve.engine.adjust import RequestHistory

        self._embeddings, self.trees = embeddings, trees
        self._width = min(vocab_size, trees.width)
        self._forms: dict[tuple[int, int], _Form] = {}
        self._known = RequestHistory(KeptGuess)

    def propose(self, guesses: Sequence[Guess]) -> list[TokenTree | None]:
        results: list[TokenTree | None] = []
        known = self._known.of([guess.request for guess in guesses])
        for guess, one in zip(guesses, known, strict=True):
            if guess.nodes + 1 < self.trees.fewest:
                results.append(None)
                continue
            tokens = guess.request.tokens
            ahead = one.value if one.place == len(tokens) else None
            rows = min(guess.nodes + 1, self.trees.most)
            form = self._form(rows, 0 if ahead is None else len(ahead))
            filled = np.full(len(form.shape), -1)
            filled[0] = tokens[-1]
            if ahead is not None:
                filled[1 : 1 + len(form.level)] = ahead[form.level, form.rank]
            results.append(TokenTree(filled, form.shape, asking=form.asking))
        return results

    def observe(self, seen: Sequence[AcceptedTokens]) -> None:
        """Keep the best tokens of the prompt rows below the last accepted guess."""
        known = self._known.of([one.request for one in seen])
        for one, kept in zip(seen, known, strict=True):
            if one.prompt_scores is None:
                kept.value = None
                continue
            said_PV = one.prompt_scores
            if self.trees.ensemble > 1:
                said_PV = said_PV.view(-1, self.trees.ensemble, said_PV.shape[1]).mean(1)
            kept.value = said_PV.topk(self._width, -1).indices.cpu().numpy()
            kept.place = one.start + len(one.tokens) + 1

    def _form(self, rows: int, state: int) -> _Form:
        value = self._forms.get((rows, state))
        if value is None:
            tree = self.trees.of(rows).trees[state]
            value = self._forms[rows, state] = self._formed(tree)
        return value

    def _formed(self, tree: StateTree) -> _Form:
        """Prompt row (i, j) hangs below row (i - 1, j), and the first ones below their guess."""
        import torch

        members = self.trees.ensemble
        parent = [-1, *(above + 1 for above in tree.spec.parent)]
        below: list[tuple[int, ...]] = []
        inputs: list[Tensor] = []
        for row, prompts in enumerate(tree.prompts):
            first = len(parent)
            for number in range(prompts):
                above = [row] * members if not number else range(len(parent) - members, len(parent))
                parent += above
            below.append(tuple(range(first, len(parent))))
            inputs.append(self._embeddings[:prompts].flatten(0, 1))
        spec = tree.spec
        return _Form(
            np.array(spec.level, dtype=int),
            np.array(spec.rank, dtype=int),
            branches(tuple(parent)),
            PromptRows(torch.cat(inputs), tuple(below)),
        )

    def memory_bytes(self) -> int:
        return self._embeddings.numel() * self._embeddings.element_size()
