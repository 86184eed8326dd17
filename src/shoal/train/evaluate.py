"""Held-out loss in bits per byte, over all ranks."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import torch

from shoal.corpora import heldout
from shoal.train.hooks import RankRun, RunHook
from shoal.train.masking import masked
from shoal.train.watch.watched_comm import phase

if TYPE_CHECKING:
    from shoal.corpora.tokens import TokenSet
    from shoal.train.loop import RankTrainer, TrainStepResult

# Enough rows a pass that per-operator overhead is small, few enough that logits fit.
_BATCH_TOKENS = 8192


class EvaluationHook(RunHook):
    """Scores held-out text at a fixed interval of steps and at the end."""

    kind = "evaluate"

    def __init__(self) -> None:
        self._late = False

    def step_done(self, run: RankRun, number: int, result: TrainStepResult) -> None:
        """Score some of it, where that is due."""
        done, every = number + 1, run.plan.job.evaluation.every
        self._late = self._late or (every > 0 and done % every == 0)
        if self._late and run.trainer.settled and done < run.total:
            self._late = False
            self._evaluate(run, done, run.plan.job.evaluation.tokens)

    def completed(self, run: RankRun) -> None:
        """Score all of it."""
        if run.plan.job.evaluation.final:
            self._evaluate(run, run.total, None)

    def _evaluate(self, run: RankRun, step: int, max_tokens: int | None) -> None:
        length, begin, text = run.plan.job.evaluation.sample_tokens, time.perf_counter(), ""
        run.event("phase", step=step, phase="evaluating")
        with phase(run.comm, "evaluate"):
            result = bits_per_byte(run.trainer, run.tokens, max_tokens=max_tokens)
            if length and run.chief:
                text = sample(run.trainer, run.tokens, length)
            run.comm.barrier()
        seconds = time.perf_counter() - begin
        run.event("eval", step=step, final=max_tokens is None, seconds=seconds, **result)
        if text:
            run.event("sample", step=step, text=text)


@torch.no_grad()
def bits_per_byte(
    trainer: RankTrainer, tokens: TokenSet, *, max_tokens: int | None
) -> dict[str, float]:
    """Score held-out documents, each with a context of its own; ranks share the batches.

    Of a masked-diffusion model it is a bound: tokens are hidden once, and their losses divided by
    the share that was.

    Args:
        trainer: whose model.
        tokens: whose held-out split.
        max_tokens: about how many tokens; None for all.

    Returns:
        ``loss`` (nats a token), ``bits_per_byte`` and ``tokens``, equal on all ranks.
    """
    engine, comm = trainer.engine, trainer.comm
    context = min(engine.config.max_position, max(512, trainer.job.seq_len))
    # A device with a budget has room for what training gives it.
    most = _BATCH_TOKENS
    if trainer.job.offload is not None:
        most = max(context, trainer.microbatch * trainer.job.seq_len)
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.device)
    engine.train(False)
    # The ranks of a replica share a batch; where forward passes are collective over the
    # replicas, all of them go through all batches and the first counts.
    together = engine.together
    counts = engine.replica == 0 or not together
    batches = list(
        heldout.heldout_chunks(
            tokens.heldout,
            context=context,
            batch_tokens=most,
            max_tokens=max_tokens,
            rank=0 if together else engine.replica,
            world=1 if together else engine.replicas,
        )
    )
    for batch in batches:
        if comm.beat is not None:
            comm.beat.alive()
        data = torch.from_numpy(batch.tokens).to(trainer.device)
        scored = torch.from_numpy(batch.scored).to(trainer.device)
        mask_id = engine.config.mask_token_id
        if mask_id is None:
            targets = data[:, 1:].masked_fill(~scored, -100)
            loss = engine.loss_sum(data[:, :-1], targets).double()
        else:
            hidden = masked(
                data[:, 1:],
                mask_id,
                seed=trainer.job.seed,
                step=int(batch.documents[0]),
                first=0,
                total=len(data),
                kept_bT=~scored,
            )
            loss = engine.loss_sum(*hidden).double()
        if counts:
            sums[0] += loss
            sums[1] += scored.sum() * engine.first_of_replica
    engine.train()
    comm.all_reduce(sums, tag="evaluation").wait()
    nll, count = sums.tolist()
    return {
        "loss": nll / count,
        "bits_per_byte": heldout.bits_per_byte(nll, int(count), tokens.heldout),
        "tokens": count,
    }


def sample(trainer: RankTrainer, tokens: TokenSet, length: int) -> str:
    """A continuation of the first held-out document's opening, the same in every run.

    Empty where no rank has the whole model, or where the model does not continue texts.
    """
    from shoal.model.generate import generate

    model = trainer.engine.whole
    continues = model is not None and model.config.causal and model.decodes
    if model is None or trainer.engine.together or not continues:
        return ""
    tokenizer = tokens.tokenizer()
    opening = tokens.heldout.document(0)[:16].tolist()
    model.eval()
    # A frozen base may lie in the type of the products.
    narrow = trainer.job.finetune is not None
    with torch.no_grad(), trainer.engine.autocast() if narrow else contextlib.nullcontext():
        ids = generate(
            model,
            [tokens.end_of_text, *opening],
            length,
            temperature=0.7,
            top_k=40,
            seed=trainer.job.seed,
        )
    model.train()
    return str(tokenizer.decode([*opening, *ids]))
