"""A runner whose decodes guess: the one loop of speculative decoding.

Shapes: N rows of a step, V vocabulary, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ServeError, require
from shoal.ir import Chunk, Request, Step, StepResult, TokenInfo
from shoal.model.transformer import Transformer
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.captured import CapturedRows
from shoal.serve.decode.protocols import Acceptance, AcceptedTokens, Drafter, Guess, Path, TokenTree
from shoal.serve.engine.hooks import EngineHook, ForwardPass, beside
from shoal.serve.engine.runner import FlatModel, FlatTokens, LocalRunner, slots
from shoal.serve.engine.sampler import log_probabilities
from shoal.serve.engine.token_choice import NOT_FINITE, choose_rows


class SpeculativeRunner(LocalRunner):
    """Computes steps as its base does, with draft tokens for decodes that have space.

    Args:
        recorded: computes steps of decodes alone by recordings; None computes all the same way.
        **options: of :class:`~shoal.serve.engine.runner.LocalRunner`; a hook that replays passes
            applies to steps without draft tokens.
    """

    def __init__(
        self,
        model: FlatModel,
        cache: PagedCache,
        *,
        drafter: Drafter,
        accept: Acceptance,
        recorded: CapturedRows | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, cache, **options)
        self.drafter, self.accept = drafter, accept
        self._recorded = recorded

    def over(self, cache: PagedCache) -> SpeculativeRunner:
        """One that computes in the same way, on another cache of the same form."""
        return SpeculativeRunner(
            self.model,
            cache,
            drafter=self.drafter,
            accept=self.accept,
            recorded=None if self._recorded is None else self._recorded.over(cache),
            attention=self.attention,
            prompts=self.prompts,
            exact=self._exact,
            hooks=beside(self.hooks, cache),
        )

    def _compute(self, step: Step) -> StepResult:
        if any(_reads_prompt(chunk) for chunk in step.chunks):
            return super()._compute(step)  # of which the drafter then has seen nothing
        if self._silent(step):
            return super()._compute(step)
        asking = [chunk for chunk in step.chunks if chunk.drafts]
        guesses = [Guess(chunk.request, chunk.drafts) for chunk in asking]
        proposed = self.drafter.propose(guesses) if guesses else []
        trees = {
            chunk.request.id: tree
            for chunk, tree in zip(asking, proposed, strict=True)
            if tree is not None and tree.nodes
        }
        # Single tokens first and longest context first, then trees, as attention wants them.
        chunks = sorted(
            step.chunks,
            key=lambda one: (one.length > 1, one.request.id in trees, -one.stop),
        )
        for chunk in chunks:
            self._check(chunk, trees.get(chunk.request.id))
        hidden_ND, logits_RV, first = self.forward(chunks, trees)
        return self._accepted(chunks, trees, hidden_ND, logits_RV, first)

    def _silent(self, step: Step) -> bool:
        """No request guesses, the drafter needs no report: the step is to cost what it does alone.

        A drafter that wants the last state waits for a step where guessing begins anew; one that
        wants them all receives everything.
        """
        return self.drafter.needs != "all" and not any(
            chunk.drafts or chunk.length > 1 or not chunk.yields for chunk in step.chunks
        )

    def forward(
        self, chunks: Sequence[Chunk], trees: dict[str, TokenTree]
    ) -> tuple[Tensor, Tensor, dict[str, int]]:
        """Hidden states, scores, and by request the first row of both that is its own.

        Of a tree every row is there, of other chunks the last one, and all of their hidden states
        where the drafter needs them: scores are of the rows that end a chunk and of trees.
        """
        if self._recorded is not None:
            result = self._recorded(chunks, trees)
            if result is not None:
                return result
        rows = FlatTokens(self.cache.block_size)
        for chunk in chunks:
            tree = trees.get(chunk.request.id)
            if tree is None:
                rows.add(chunk)
            else:
                rows.add_tree(chunk, tree)
        fed = rows.fed(self.cache.device)
        mixer = self._mixer(rows.contexts, fed[2])
        scored: list[int] = []
        first: dict[str, int] = {}
        for chunk, last, context in zip(chunks, rows.last, rows.contexts, strict=True):
            own = range(last + 1 - context.length, last + 1)
            first[chunk.request.id] = len(scored)
            if chunk.request.id in trees:
                scored += own
            elif chunk.yields:
                scored.append(last)
        place_R = torch.tensor(scored, dtype=torch.int64, device=self.cache.device)
        everything = self.drafter.needs == "all"
        needed = None if everything else place_R
        embeds = self._embedded(fed[0], rows, chunks, trees)
        work = ForwardPass(chunks, rows.contexts, rows.last, needed=needed)
        with self.hooks.within(EngineHook.around, work):
            if embeds is None:
                hidden = self.model.flat(fed[0], fed[1], mixer, needed)
            else:
                model = self.model
                assert isinstance(model, Transformer)
                hidden = model.finished(*model.through(embeds, fed[1], mixer, needed))
        assert hidden is not None
        if everything:
            return hidden, self._logits(hidden[place_R]), first
        return hidden, self._logits(hidden), first

    def _embedded(
        self,
        tokens_N: Tensor,
        rows: FlatTokens,
        chunks: Sequence[Chunk],
        trees: dict[str, TokenTree],
    ) -> Tensor | None:
        """What is fed [N, D], where some rows are no tokens."""
        tensor: Tensor | None = None
        for chunk, last in zip(chunks, rows.last, strict=True):
            tree = trees.get(chunk.request.id)
            if tree is not None and tree.asking is not None:
                if tensor is None:
                    assert isinstance(self.model, Transformer)
                    tensor = self.model.embed(tokens_N)
                inputs = tree.asking.inputs
                tensor[last + 1 - len(inputs) : last + 1] = inputs
        return tensor

    def _logits(self, hidden_RD: Tensor) -> Tensor:
        logits = self.model.logits(hidden_RD)
        assert logits is not None
        return logits

    def _accepted(
        self,
        chunks: Sequence[Chunk],
        trees: dict[str, TokenTree],
        hidden_ND: Tensor,
        logits_RV: Tensor,
        first: dict[str, int],
    ) -> StepResult:
        """Walk every tree, choose for every other chunk, move what is kept, inform the drafter."""
        plain = [one for one in chunks if one.yields and one.request.id not in trees]
        guessed = [one for one in chunks if one.request.id in trees]
        tokens: dict[str, tuple[int, ...]] = {}
        infos: dict[str, tuple[TokenInfo, ...]] = {}
        failed: Mapping[str, str] = {}
        errors: dict[str, str] = {}
        if plain:
            requests = [one.request for one in plain]
            logits = self._of(logits_RV, [first[one.id] for one in requests])
            chosen = choose_rows(self._adjust, logits, requests)
            tokens, infos = dict(chosen.tokens), dict(chosen.infos)
            failed, errors = chosen.failed, dict(chosen.errors)
        paths: dict[str, Path] = {}
        if guessed:
            requests = [one.request for one in guessed]
            spread = [trees[one.id] for one in requests]
            rows = [
                first[one.id] + row
                for one, tree in zip(requests, spread, strict=True)
                for row in range(len(tree.shape))
            ]
            walked = self.accept.walk(spread, requests, self._of(logits_RV, rows))
            paths = {one.id: path for one, path in zip(requests, walked, strict=True)}
            errors |= dict.fromkeys(self._unsound(logits_RV, paths, first), NOT_FINITE)
            tokens |= {name: path.tokens for name, path in paths.items()}
            infos |= self._infos(logits_RV, requests, paths, first)
            self._keep(guessed, paths)
        request = self._asked(trees, paths, logits_RV, first)
        ended = failed.keys() | errors.keys()
        self._tell(chunks, trees, paths, tokens, hidden_ND, first, request, ended)
        return StepResult(
            tokens=tokens,
            infos=infos,
            failed=failed,
            errors=errors,
            guessed={
                one.request.id: trees[one.request.id].nodes if one.request.id in trees else 0
                for one in chunks
                if one.drafts
            },
        )

    @staticmethod
    def _of(logits_RV: Tensor, rows: list[int]) -> Tensor:
        return logits_RV if rows == list(range(len(logits_RV))) else logits_RV[rows]

    @staticmethod
    def _unsound(logits_RV: Tensor, paths: dict[str, Path], first: dict[str, int]) -> list[str]:
        """Requests with a token on their path that was chosen of scores that are not finite."""
        names = [name for name, path in paths.items() for _ in path.tokens]
        rows = [first[one] + row for one, path in paths.items() for row in (0, *path.rows)]
        tokens = [token for path in paths.values() for token in path.tokens]
        place = torch.tensor([rows, tokens], device=logits_RV.device)
        scores = logits_RV[place[0], place[1]].tolist()
        return [name for name, one in zip(names, scores, strict=True) if not math.isfinite(one)]

    def _infos(
        self,
        logits_RV: Tensor,
        requests: Sequence[Request],
        paths: dict[str, Path],
        first: dict[str, int],
    ) -> dict[str, tuple[TokenInfo, ...]]:
        """Log probabilities of accepted tokens, where they were asked for."""
        infos = {}
        for request in requests:
            if request.params.logprobs is None:
                continue
            path = paths[request.id]
            rows = [first[request.id] + row for row in (0, *path.rows)]
            counts = [request.params.logprobs] * len(rows)
            infos[request.id] = tuple(log_probabilities(logits_RV[rows], path.tokens, counts))
        return infos

    @staticmethod
    def _asked(
        trees: dict[str, TokenTree],
        paths: dict[str, Path],
        logits_RV: Tensor,
        first: dict[str, int],
    ) -> dict[str, Tensor]:
        """Scores of the rows that asked below the end of each path."""
        result = {}
        for name, path in paths.items():
            asking = trees[name].asking
            if asking is not None:
                below = asking.below[(0, *path.rows)[-1]]
                if below:
                    result[name] = logits_RV[[first[name] + row for row in below]]
        return result

    def _keep(self, chunks: Sequence[Chunk], paths: dict[str, Path]) -> None:
        """Move the keys and values of accepted nodes to the places that their tokens have now."""
        sources: list[int] = []
        targets: list[int] = []
        size = self.cache.block_size
        for chunk in chunks:
            for depth, row in enumerate(paths[chunk.request.id].rows, 1):
                if row != depth:
                    places = (chunk.start + row, chunk.start + depth)
                    source, target = slots(chunk.request.blocks, places, size)
                    sources.append(source)
                    targets.append(target)
        self.cache.keep(sources, targets)

    def _tell(
        self,
        chunks: Sequence[Chunk],
        trees: dict[str, TokenTree],
        paths: dict[str, Path],
        tokens: dict[str, tuple[int, ...]],
        hidden_ND: Tensor,
        first: dict[str, int],
        asked: dict[str, Tensor],
        ended: Collection[str],
    ) -> None:
        """What is certain now, for the drafter; nothing of requests that have ended."""
        needs = self.drafter.needs
        seen: list[AcceptedTokens] = []
        row = 0
        for chunk in chunks:
            request = chunk.request
            path = paths.get(request.id)
            certain = request.tokens[chunk.start : chunk.stop]
            if path is not None:
                certain = [*certain, *path.tokens[:-1]]
            new = tokens.get(request.id)
            hidden = None
            if needs != "nothing":
                # Of all rows, or of those that are scored: a chunk in the middle of a prompt has
                # none of these.
                at = row if needs == "all" else first[request.id]
                if path is not None:
                    kept = (0, *path.rows) if needs == "all" else (path.rows or (0,))[-1:]
                    hidden = hidden_ND[[at + one for one in kept]]
                elif needs == "all":
                    hidden = hidden_ND[at : at + chunk.length]
                elif new is not None:
                    hidden = hidden_ND[at : at + 1]
            row += len(trees[request.id].shape) if request.id in trees else chunk.length
            if request.id in ended:
                continue
            root = new[-1] if new else None
            seen.append(
                AcceptedTokens(request, chunk.start, certain, hidden, root, asked.get(request.id))
            )
        self.drafter.observe(seen)

    def _check(self, chunk: Chunk, tree: TokenTree | None = None) -> None:
        super()._check(chunk)
        if tree is not None:
            require(
                1 <= tree.nodes <= chunk.drafts,
                f"request {chunk.request.id}: guessed tokens",
                tree.nodes,
                expected=f"at most {chunk.drafts}, those it holds room for",
                hint="the drafter must keep to what it is asked for",
                error=ServeError,
            )


def _reads_prompt(chunk: Chunk) -> bool:
    """Whether hidden states of the chunk are wanted beside that of its last token."""
    params = chunk.request.params
    scored = params.prompt_logprobs is not None and chunk.start < chunk.request.n_prompt
    return params.pooling is not None or scored
