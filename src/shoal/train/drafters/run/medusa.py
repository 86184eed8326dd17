"""Medusa's heads in training: on frozen features, or together with the target.

Source: Cai et al., Medusa, 2024, sections 2.2.1, 2.2.2 and 2.3.2.
Shapes: B sequences, T tokens, D hidden, V vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.ir.drafting import DrafterJob
from shoal.model.drafters.medusa import MedusaHead, MedusaHeads
from shoal.model.loss import token_loss_sum
from shoal.model.transformer import Transformer
from shoal.train.drafters.protocols import TargetRows

if TYPE_CHECKING:
    from shoal.train.drafters.medusa import MedusaTraining

# The target changes more slowly than its heads.
_TARGET_RATE = 0.25


def heads_loss(heads: MedusaHeads, rows: TargetRows, decay: float) -> Tensor:
    """Sum over heads of decay^k times the mean cross-entropy of the token k + 1 places ahead."""
    total: Tensor | None = None
    for number, head in enumerate(heads.heads, start=1):
        assert isinstance(head, MedusaHead)
        states = head.states(rows.hidden[:, : -number - 1])
        truth = rows.tokens[:, number + 1 :]
        loss = token_loss_sum(states, head.out.weight, truth) * (decay**number / truth.numel())
        total = loss if total is None else total + loss
    assert total is not None
    return total


class FrozenLearner:
    """Version 1: the target is frozen and not loaded.

    Args:
        target: gives the heads their output matrix.
    """

    def __init__(self, part: MedusaTraining, target: Transformer) -> None:
        self.part = part
        self.net: nn.Module = MedusaHeads.of(target.output_weight.detach().float(), part.heads)

    @property
    def heads(self) -> MedusaHeads:
        """The heads."""
        assert isinstance(self.net, MedusaHeads)
        return self.net

    def groups(self) -> Sequence[tuple[Sequence[nn.Parameter], float]]:
        """All of the heads."""
        return [(list(self.net.parameters()), self.part.lr)]

    def loss(self, rows: TargetRows, *, step: int, total: int) -> Tensor:
        """What the heads say beside what the text says."""
        return heads_loss(self.heads, rows, self.part.decay)

    def guesses(self, rows: TargetRows, places: Sequence[int]) -> Tensor:
        """Logits of each head, from the features at the places themselves."""
        logits: Tensor = self.heads(rows.hidden[:, list(places)].flatten(0, 1))
        return logits

    def state(self) -> Mapping[str, Tensor]:
        """The heads."""
        return self.net.state_dict()

    def finish(self, directory: Path) -> Path | None:
        """The target is what it was."""
        return None


class JointLearner:
    """Version 2: a low-rank change of the target is trained with the heads.

    The target's original distribution, computed from the stored features, is the reference of the
    penalty.

    Args:
        target: is changed.
    """

    def __init__(self, part: MedusaTraining, target: Transformer, job: DrafterJob) -> None:
        from shoal.train.peft.base import EVERY
        from shoal.train.peft.lora import Lora

        self.part, self._directory = part, Path(job.model)
        self.target = target.float().train()
        self.output_VD = target.output_weight.detach().clone()
        self.heads = MedusaHeads.of(self.output_VD, part.heads)
        method = Lora(r=part.r, alpha=2.0 * part.r, targets=EVERY)
        self.handle = method.inject(self.target, seed=job.seed)
        self.handle.stay()
        # Only what is trained, so that states to go on from are small.
        change = nn.ParameterDict(
            {name.replace(".", "/"): p for name, p in self.handle.trainable().items()}
        )
        self.net: nn.Module = nn.ModuleDict({"heads": self.heads, "change": change})
        self._change = list(change.values())

    def groups(self) -> Sequence[tuple[Sequence[nn.Parameter], float]]:
        """The heads, and more slowly the change of the target."""
        slow = self.part.lr * _TARGET_RATE
        return [(list(self.heads.parameters()), self.part.lr), (self._change, slow)]

    def loss(self, rows: TargetRows, *, step: int, total: int) -> Tensor:
        """The heads' loss first; then the divergence from what the target said, and theirs."""
        if step < self.part.warmup * total:
            return heads_loss(self.heads, rows, self.part.decay)
        hidden = self.target.hidden(rows.tokens)
        now = F.log_softmax(F.linear(hidden, self.output_VD).float(), -1).flatten(0, 1)
        before = F.log_softmax(F.linear(rows.hidden, self.output_VD).float(), -1)
        kept = F.kl_div(now, before.flatten(0, 1), reduction="batchmean", log_target=True)
        said = heads_loss(self.heads, TargetRows(rows.tokens, hidden), self.part.decay)
        return kept + self.part.weight * said

    def guesses(self, rows: TargetRows, places: Sequence[int]) -> Tensor:
        """Logits of each head, from features of the changed target."""
        hidden = self.target.hidden(rows.tokens)[:, list(places)]
        logits: Tensor = self.heads(hidden.flatten(0, 1))
        return logits

    def state(self) -> Mapping[str, Tensor]:
        """The heads."""
        return self.heads.state_dict()

    def finish(self, directory: Path) -> Path | None:
        """Write the changed target, merged: the heads are for that one."""
        from shoal.model import huggingface
        from shoal.train.peft.run.handle import ModelPeftHandle

        assert isinstance(self.handle, ModelPeftHandle)
        merged = self.handle.keep_merged()
        assert isinstance(merged, Transformer)
        place = directory / "target"
        tokenizer = self._directory / "tokenizer.json"
        with torch.no_grad():
            huggingface.write(place, merged, tokenizer if tokenizer.is_file() else None)
        return place
