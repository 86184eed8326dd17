"""The part of a model that one serving rank computes: some layers, some heads, some width.

It is the model's own code with fewer heads and a narrower feed-forward layer, its operators
taken by dispatch as in one process. After attention and after the feed-forward layer the ranks
of a stage add up what each of them has: two sums a layer, or one where both branches read the
same. Embedding and head are shared by rows of the vocabulary.

Shapes: N tokens, D hidden, R rows, V vocabulary, C = ceil(V / tp) rows of a rank.

Source: Shoeybi et al., Megatron-LM, 2019, section 3; Du et al., EnergonAI, 2022.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.core.errors import ServeError, require
from shoal.core.traits import traits
from shoal.ir import Parallel, ServeJob
from shoal.model import desync, ladder, parscale
from shoal.model.attention import Mixer
from shoal.model.feedforward import SwiGLU
from shoal.model.transformer import Transformer, TransformerBlock
from shoal.parallel.tensor.block import local_config
from shoal.parallel.tensor.slices import slices, take, vocabulary_rows
from shoal.parallel.vocab.layers import VocabularyTable

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig
    from shoal.model.parameters import Parameters
    from shoal.parallel.protocols import Comm
    from shoal.serve.ranks.boundary import RankBoundary

# Under these tags the meter counts the two sums of a layer, and the scores of the head.
_SUM, _HEAD = "tensor", "vocabulary"


def layers_of(num_layers: int, stage: int, stages: int) -> range:
    """The layers of a stage; those that are not shared equally go to the last stages."""
    return range(num_layers * stage // stages, num_layers * (stage + 1) // stages)


def check_parts(job: ServeJob, config: ModelConfig) -> None:
    """Refuse what ranks cannot share.

    Raises:
        ServeError: the model cannot be split so, or the job asks for what ranks do not do.
        PlanError: heads or width that the ranks cannot share evenly.
    """
    from shoal.parallel.tensor.slices import check_split

    parallel = job.parallel
    check_split(config, Parallel(tp=parallel.tp), copy_kv=True)
    require(
        parallel.pp <= config.num_layers,
        "parallel.pp",
        parallel.pp,
        expected=f"at most {config.num_layers}, the layers of model {config.name}",
        hint="a stage has at least one layer",
        error=ServeError,
    )
    # Between steps under way, a block on its way would be taken for one that is there.
    preempt = traits("preempt", job.preempt)
    swaps = "recomputes_cache" not in preempt and parallel.depth == 1
    for what, wanted, good in (
        ("disagg", job.disagg, job.disagg is None),
        ("preempt", job.preempt.name, "swaps_cache" not in preempt or swaps),
        ("weights", job.weights, job.weights == "plain"),
        ("parallel.pp", parallel.pp, parallel.pp == 1 or not config.architecture.name),
        ("parallel.tp", parallel.tp, parallel.tp in _ranks(config, parallel.tp)),
        (
            "kv_format",
            str(job.kv_format),
            job.kv_format.options.get("ksort", "none") == "none",
        ),
    ):
        require(
            good,
            what,
            wanted,
            expected="with parallel.tp or parallel.pp above 1: no instances for phases, preempt = "
            "recompute (or swap, with one step under way), weights = plain, a kv_format that does "
            "not sort channels; and no architecture but a family's own or, with tp, ladder, "
            "streams, or desync with as many ranks as the model has",
            hint="leave it out, or serve with one process",
            error=ServeError,
        )


def _ranks(config: ModelConfig, wanted: int) -> tuple[int, ...]:
    """How many ranks can share the heads of a model, if it is not only one."""
    if config.architecture.shared_by_any:
        return (wanted,)
    return (config.architecture.residual.apart,)


def _summed(comm: Comm, biases: list[Tensor], out: Tensor) -> Tensor:
    """The sum of the ranks' shares of an output, which is overwritten, and of its biases."""
    comm.all_reduce(out, tag=_SUM).wait()
    for bias in biases:
        out.add_(bias)
    return out


class _Summed(nn.Module):
    """A layer of which each rank computes a share of the sum; the bias is added once, after it."""

    def __init__(self, inner: nn.Module, comm: Comm, bias: Tensor | None) -> None:
        super().__init__()
        self.inner, self._comm = inner, comm
        self._biases = [] if bias is None else [bias]

    def forward(self, x: Tensor) -> Tensor:
        return _summed(self._comm, self._biases, self.inner(x))


class PartModel:
    """One rank's part; a :class:`~shoal.serve.engine.runner.FlatModel`.

    Args:
        job: what to serve.
        parameters: of the whole model; only what this rank needs is read, and cut at once.
        tp: the ranks of this stage.
        boundary: to the stages before and behind.
        layers: numbers of the layers of this stage.

    Raises:
        ShoalError: the model cannot be split so, or cannot be read.
    """

    def __init__(
        self, job: ServeJob, parameters: Parameters, tp: Comm, boundary: RankBoundary, layers: range
    ) -> None:
        from shoal.serve.engine.build import prepare

        config = parameters.config
        self.config, self.tp, self.boundary = config, tp, boundary
        self.ticket = 0
        rows, padding = vocabulary_rows(config.vocab_size, tp.world, tp.rank)
        self.local_config = local_config(config, tp.world).model_copy(
            update={"num_layers": len(layers), "vocab_size": len(rows) + padding}
        )
        with torch.device("meta"):
            local = Transformer(self.local_config)
            self._table = VocabularyTable(
                config.vocab_size, config.hidden, tp if tp.world > 1 else None
            )
        if not (boundary.first or (boundary.last and config.tied)):
            local.embed = nn.Embedding(0, config.hidden, dtype=parameters.dtype)
        if not boundary.last:
            local.output = None
        self._load(local, parameters, layers)
        self._biases = [self._without_bias(block) for block in local.blocks]
        self._residual = config.architecture.residual.name
        self.local = prepare(job, local)
        self._table.weight = nn.Parameter(local.embed.weight, requires_grad=False)
        if tp.world > 1 and self._residual == "standard":
            for block, (mixed, fed) in zip(self.local.blocks, self._biases, strict=True):
                if config.family == "parallel":
                    biases = [one for one in (mixed, fed) if one is not None]
                    block.both = partial(_summed, tp, biases)  # type: ignore[assignment]
                    continue
                block.attention.o_proj = _Summed(block.attention.o_proj, tp, mixed)  # type: ignore[union-attr,arg-type]
                block.mlp = _Summed(block.mlp, tp, fed)  # type: ignore[arg-type]

    @property
    def weight(self) -> Tensor:
        """See :class:`~shoal.serve.engine.runner.FlatModel`."""
        return self.local.embed.weight

    @property
    def blocks(self) -> nn.ModuleList:
        """This rank's share of the layers."""
        return self.local.blocks

    def flat(
        self, tokens_N: Tensor, position_N: Tensor, mixer: Mixer, rows_R: Tensor | None = None
    ) -> Tensor | None:
        """See :class:`~shoal.serve.engine.runner.FlatModel`; sends to the next stage, if any."""
        if self.boundary.first:
            x_ND = self._table.look_up(tokens_N, sp=False)
        else:
            x_ND = self.boundary.take(self.ticket, len(tokens_N))
        needed = rows_R if self.boundary.last else None
        if self._residual == "ladder":
            joined = ladder.through(self.local, x_ND, position_N, mixer, needed, self._join)
            return self.local.finished(*joined)
        if self._residual == "desync":
            joined = desync.through(self.local, x_ND, position_N, mixer, needed, self._synced)
            return self.local.finished(*joined)
        if self.config.architecture.streams.num > 1:
            return parscale.flat(self.local, x_ND, position_N, mixer, needed)
        x_ND, branch_ND = self.local.through(x_ND, position_N, mixer, needed)
        if not self.boundary.last:
            self.boundary.send(self.ticket, x_ND + branch_ND)
            return None
        return self.local.finished(x_ND, branch_ND)

    def logits(self, hidden_RD: Tensor) -> Tensor | None:
        """Scores [R, V] on the first rank of the stage, of all ranks' rows of the vocabulary."""
        own_RC = self.local.logits(hidden_RD).contiguous()
        if self.tp.world == 1:
            return own_RC
        all_TRC = own_RC.new_empty(self.tp.world, *own_RC.shape)
        self.tp.all_gather(all_TRC, own_RC, tag=_HEAD).wait()
        if self.tp.rank:
            return None
        return all_TRC.transpose(0, 1).reshape(len(own_RC), -1)[:, : self.config.vocab_size]

    def _join(self, out: Tensor) -> ladder.Late:
        """Start the sum of an output over the ranks; what it returns waits for it."""
        if self.tp.world == 1:
            return out
        pending = self.tp.all_reduce(out, tag=_SUM)

        def landed() -> Tensor:
            pending.wait()
            return out

        return landed

    def _synced(self, x: Tensor, output: Tensor, last: bool) -> Tensor:
        """The mean of the ranks' streams, and all of an output."""
        both = x / self.tp.world + output
        self.tp.all_reduce(both, tag=_SUM).wait()
        return both

    def _load(self, local: Transformer, parameters: Parameters, layers: range) -> None:
        parallel = Parallel(tp=self.tp.world)
        every = slices(self.config, parallel, self.tp.rank, copy_kv=True)
        for name, parameter in list(local.named_parameters()):
            if not parameter.numel():
                continue
            whole = name
            if name.startswith("blocks."):
                _, number, leaf = name.split(".", 2)
                whole = f"blocks.{layers[int(number)]}.{leaf}"
            owner, _, leaf = name.rpartition(".")
            value = take(parameters(whole), every[whole])
            setattr(local.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))

    def _without_bias(self, block: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """Take the biases away that come after a sum; of a ladder, one rank's share has them."""
        assert isinstance(block, TransformerBlock)
        if self.tp.world == 1 or (block.ladder and self.tp.rank == 0):
            return None, None
        results: list[Tensor | None] = []
        last = block.mlp.down_proj if isinstance(block.mlp, SwiGLU) else None
        for linear in (block.attention.o_proj, last):
            bias = None if linear is None else linear.bias
            results.append(None if bias is None else bias.detach())
            if linear is not None:
                linear.register_parameter("bias", None)
        return results[0], results[1]
