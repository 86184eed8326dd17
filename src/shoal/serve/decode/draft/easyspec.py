"""A draft model guesses with several of its layers at a time; no training.

Consecutive layers read the same, stale input while they draft, so their attention is one
computation. What that costs is acceptance, never a token. After each verification the exact draft
reads what was accepted: it repairs the cache and gives the first guess of the next round.

Source: Wu et al., EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU
Utilization, 2025.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge

from shoal.core.config import Kind
from shoal.core.errors import ConfigError, require
from shoal.core.parts import Choice, part
from shoal.core.traits import traits
from shoal.ir import MAX_NODES, Expectation, ServeJob
from shoal.plan.trees.fuzzy import Groups, even_groups, search, spans
from shoal.serve.decode.draft.part import DraftModelDrafter, check_tree, expectation

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer
    from shoal.serve.decode.draft.net import DraftNet

# Text, in tokens, on which a group search asks how often a guess is right, and passes it times.
_TEXT, _PASSES = 48, 15


@part
class EasySpec:
    """A draft model whose layers are computed in parallel, group by group.

    Args:
        path: directory of the draft model, as for ``draft_model``.
        depth: number of draft tokens in a path.
        breadth: nodes of each level that are expanded; 1 makes a chain.
        nodes: largest number of draft tokens that are verified; 0 for breadth * depth.
        group: layers of a group, or the size of each group, or ``auto``, which measures groups when
            the engine starts. The first and the last layer are not in a group. 1 is plain drafting.
        realise: ``fused`` computes a group's projections as one product and its attention as one
            call, ``sequential`` computes them one after another, and ``ranks`` computes each
            layer's attention in another process, which stores its keys and values, and shards the
            width of feed-forward layers over the processes.
        stale: what reads the input of a group: ``attention`` of its layers, or ``full``, also their
            feed-forward layers, which then form one wide layer.
        ranks: number of processes with ``realise: ranks``; the serving process is the first one.
        cores: cores to which the other processes are pinned, one each; empty for no pinning.
        calibrate: compute the keys and values of accepted tokens exactly; False keeps stale ones in
            the draft's cache, to measure the loss of accepted tokens.
        accept: how draft tokens are accepted.
    """

    path: str
    depth: int = 4
    breadth: int = 1
    nodes: int = 0
    group: int | tuple[int, ...] | Literal["auto"] = 4
    realise: Literal["fused", "sequential", "ranks"] = "fused"
    stale: Literal["attention", "full"] = "attention"
    ranks: Annotated[int, Ge(1)] = 2
    cores: tuple[int, ...] = ()
    calibrate: bool = True
    accept: Annotated[Choice, Kind("accept")] = Choice(name="sample_match")

    def __post_init__(self) -> None:
        check_tree("easyspec", self.depth, self.breadth, self.nodes)
        where = "speculative.easyspec.group"
        if isinstance(self.group, int):
            require(self.group >= 1, where, self.group, expected="1 or more, sizes, or auto")
        elif self.group != "auto" and not self.group:
            raise ConfigError(f"{where} = []: expected one size for each group, or one number")
        if self.realise == "ranks" and self.group == "auto":
            raise ConfigError(
                f"{where} = auto with realise = ranks: every rank has to know the groups when it "
                "starts; find them with realise: fused, and give them"
            )
        if self.cores and self.realise != "ranks":
            raise ConfigError(
                f"speculative.easyspec.cores = {list(self.cores)}: expected none without realise: "
                "ranks, the draft is in the process that serves"
            )

    def expects(self) -> Expectation:
        return expectation(
            self.path, self.depth, self.breadth, self.nodes or self.breadth * self.depth
        )

    def drafter(self, job: ServeJob, model: Transformer) -> DraftModelDrafter:
        """See :class:`~shoal.serve.decode.protocols.Speculator`.

        Raises:
            ModelError: no model lies there, it is of another vocabulary or tokenizer, or its
                layers cannot read stale input.
            ConfigError: groups that it does not have.
        """
        from shoal.model import huggingface
        from shoal.serve.decode.draft.files import load_draft

        if self.realise == "ranks":
            return self._by_ranks(job, model)
        net, limit = load_draft(self.path, job, model)
        # Kernels have packed the weights of the one that is served.
        raw = huggingface.read(Path(self.path), model.weight.dtype).to(model.weight.device)
        raw = raw.requires_grad_(False)
        if self.group == "auto":
            text = _text(model, limit)
            groups = search(
                net.model.config.num_layers,
                lambda tried: _token_s(self._quick(net, raw, tried, limit), text, self.depth),
            )
        else:
            groups = self._groups(net.model.config.num_layers)
        quick = self._quick(net, raw, groups, limit) if max(groups) > 1 else None
        return self._drafter(net, quick, limit)

    def _groups(self, layers: int) -> Groups:
        where = "speculative.easyspec.group"
        assert self.group != "auto"
        if isinstance(self.group, int):
            return even_groups(self.group, layers, where)
        spans(self.group, layers, where)
        return self.group

    def _drafter(self, net: DraftNet, quick: DraftNet | None, limit: int) -> DraftModelDrafter:
        return DraftModelDrafter(
            net,
            depth=self.depth,
            breadth=self.breadth,
            nodes=self.nodes,
            limit=limit,
            draws="draws_guesses" in traits("accept", self.accept),
            quick=quick,
            repairs=self.calibrate,
        )

    def _by_ranks(self, job: ServeJob, model: Transformer) -> DraftModelDrafter:
        """With the other ranks in processes of their own."""
        from shoal.serve.decode.draft.files import check_draft, limit_of
        from shoal.serve.decode.draft.ranked import part_of, ranked
        from shoal.serve.decode.draft.ranked_worker import DraftRanks, RankedNet

        if model.weight.device.type != "cpu":
            raise ConfigError(
                f"speculative.easyspec.realise = ranks: the model is on {model.weight.device}, and "
                "ranks of a draft are processes of a CPU's cores; use realise: fused"
            )
        config = check_draft(Path(self.path), job, model.config)
        where = "speculative.easyspec.ranks"
        require(
            self.ranks <= config.num_layers,
            where,
            self.ranks,
            expected=f"at most {config.num_layers}, the layers of model {config.name}",
        )
        limit, groups = limit_of(config, job), self._groups(config.num_layers)
        dtype, full = model.weight.dtype, self.stale == "full"
        fields = {
            "path": str(Path(self.path).resolve()),
            "job": job.model_dump(mode="json", exclude_none=True),
            "limit": limit,
            "dtype": str(dtype).removeprefix("torch."),
            "groups": groups,
            "full": full,
        }
        team = DraftRanks(fields, self.ranks, self.cores)
        try:
            part = part_of(self.path, job, limit, dtype, 0, self.ranks)
            comm = team.join()
        except BaseException:
            team.close()
            raise
        exact = RankedNet(ranked(part, comm, limit), team, quick=False)
        if max(groups) == 1:
            return self._drafter(exact, None, limit)
        fuzzy = ranked(part, comm, limit, groups=groups, full=full)
        return self._drafter(exact, RankedNet(fuzzy, team, quick=True), limit)

    def _quick(self, net: DraftNet, raw: Transformer, groups: Groups, limit: int) -> DraftNet:
        """Passes of the draft by groups, on the cache of the exact one."""
        from shoal.model.transformer import Transformer
        from shoal.serve.decode.draft.fuzzy import FuzzyModel, FuzzyRecordings
        from shoal.serve.decode.draft.net import DraftNet
        from shoal.serve.decode.draft.stacked import stack

        draft, full = net.model, self.stale == "full"
        assert isinstance(draft, Transformer)
        stacked = stack(raw, groups, full, draft) if self.realise == "fused" else None
        fuzzy = FuzzyModel(draft, groups, stacked, full=full)
        recorded = None
        if net.recorded is not None and net.attention is not None:
            recorded = FuzzyRecordings(fuzzy, net.cache, net.attention, limit + MAX_NODES + 1)
        return DraftNet(
            fuzzy, net.cache, attention=net.attention, prompts=net.prompts, recorded=recorded
        )


def _text(model: Transformer, limit: int) -> list[int]:
    """Some tokens that the target says."""
    from shoal.model.generate import generate

    count = min(_TEXT, limit - 2)
    return [0, *generate(model, [0], count, temperature=1.0, seed=0, eos=())]


def _token_s(quick: DraftNet, text: list[int], depth: int) -> float:
    """Seconds of drafting for each token that is accepted, estimated from a short text."""
    import numpy as np
    import torch

    from shoal.serve.decode.captured import TreeRows

    size = quick.cache.block_size
    blocks = list(range(-(-(len(text) + 1) // size)))

    def rows(tokens: list[int], start: int) -> TreeRows:
        at = np.arange(len(tokens))
        seen = ((np.uint64(1) << (at + 1).astype(np.uint64)) - np.uint64(1)).view(np.int64)
        return TreeRows(tokens, blocks, start, start, at, seen)

    with torch.inference_mode():
        guessed = quick.rows([rows(text[:-1], 0)]).float().argmax(-1).tolist()
        right = float(np.mean([one == two for one, two in zip(guessed, text[1:], strict=True)]))
        last = rows(text[-1:], len(text) - 1)
        taken = []
        for _ in range(_PASSES):
            began = time.perf_counter()
            quick.rows([last])
            taken.append(time.perf_counter() - began)
    # The first pass prepares, the second records.
    accepted = sum(right**place for place in range(depth + 1))
    return depth * statistics.median(taken[2:]) / accepted
