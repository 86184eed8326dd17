"""[63] Ladder-residual: the sums of tensor parallelism hidden behind the next sub-layer.

Mini-models of bytes, standard and ladder, same weights and text, three seeds; the trained standard
models with their upper half rewired, after a tenth of the steps more. Two processes decode eight
requests; a sum is there a fixed time after it began, the same for all models and such that the
standard model's step is two fifths communication. Beside the standard model and the parallel block.
The A/A run puts the standard model in the place of the ladder.

Source: Zhang et al., Ladder-Residual: Parallelism-Aware Architecture for Accelerating Large Model
Inference with Communication Overlapping, 2025.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Self

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import llama, requests, serve_job, served
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.ir import Architecture

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer
    from shoal.parallel.protocols import Comm
    from shoal.serve.ranks.workers import RankedEngine

# Of the standard model's step, in communication; how near the link's time brings it, and in how
# many trials.
_SHARE = 0.4
_CLOSE = 0.02
_CALIBRATIONS = 4
_REQUESTS = 8


@part
class LadderClaim(BaseClaim, row=63):
    """Loss of three seeds, and decoding on two ranks, beside the standard model.

    Args:
        seeds: trainings of each kind.
        steps: steps of one training.
        deep: blocks of the models that are trained; reading late costs a shallow one more.
        hidden: width of the model that is decoded with.
        layers: blocks of that model.
        tokens: tokens that each request generates.
        rounds: timed pairs.
    """

    seeds: Annotated[int, Ge(1)] = 3
    steps: Annotated[int, Ge(1)] = 250
    deep: Annotated[int, Ge(1)] = 8
    hidden: Annotated[int, Ge(1)] = 768
    layers: Annotated[int, Ge(1)] = 8
    tokens: Annotated[int, Ge(1)] = 24
    rounds: Annotated[int, Ge(1)] = 16

    def collect(self, run: ClaimRun) -> None:
        """Count the sums; then, unless it is quick, train and decode."""
        ours = run.pick("ladder", "standard")
        # Sums of a step on two ranks, how late they are waited for, and the tokens.
        begun, late, wrong = counted(ours, run.seed)
        standard, _, _ = counted("standard", run.seed)
        run.put("sums_beyond_standard", begun - standard)
        run.put("wrong_tokens", wrong)
        run.put("reads_late", late)
        if run.quick:
            return
        self._train(run, ours)
        self._decode(run, ours)
        # A ladder of as many sums can learn what the standard model does, and is as fast as none.
        run.bounds |= {"loss": 1.0, "converted_loss": 1.0, "of_prediction": 1.0}

    def _train(self, run: ClaimRun, ours: str) -> None:
        from shoal.claims.experiments.arch_training import Recipe, heldout, mini, text, train
        from shoal.model.architecture import rebuilt
        from shoal.train.zoo import random

        data = text(run.context.data)
        recipe, more = Recipe(steps=self.steps), Recipe(steps=max(1, self.steps // 10), lr=1e-3)
        losses: list[tuple[float, float]] = []
        after: list[tuple[float, float]] = []
        loss_of = partial(heldout, data=data.heldout, recipe=recipe)

        for number in range(self.seeds):
            seed = run.seed + number
            run.progress(f"training, seed {seed}", number / self.seeds * 0.8)

            def made(name: str, seed: int = seed) -> Transformer:
                config = mini(128, self.deep, architecture={"residual": name})
                return train(random(config, seed), data.train, recipe, seed)

            def on(model: Transformer, seed: int = seed) -> float:
                return loss_of(train(model, data.train, more, seed, first=self.steps))

            standard = run.remember(f"standard {seed}", lambda: made("standard"))
            own = run.remember(f"{ours} {seed} loss", lambda: loss_of(made(ours)))
            losses.append((own, loss_of(standard)))
            wiring: dict[str, Any] = {"name": ours}
            if ours == "ladder":
                wiring |= {"layers": "upper_half", "rewire": True}
            half = rebuilt(
                copy.deepcopy(standard), Architecture.model_validate({"residual": wiring})
            )
            whole = copy.deepcopy(standard)
            going_on = run.remember(f"standard {seed} on", partial(on, whole))
            after.append((on(half), going_on))
        run.put("loss", *zip(*losses, strict=True))
        run.put("converted_loss", *zip(*after, strict=True))

    def _decode(self, run: ClaimRun, ours: str) -> None:
        """Decode in turn; says where the time of a step goes."""

        def timed(*names: str, rounds: int = 5) -> Mapping[str, tuple[float, ...]]:
            arms = {name: partial(runs.run, name) for name in names}
            return run.race(arms, rounds, swaps={})

        run.progress("decoding", 0.85)
        sums = (2 * self.layers + 1) * self.tokens  # of each layer two, and of the embedding one
        with Decoding(
            run.work_dir, self.hidden, self.layers, _REQUESTS, self.tokens, run.seed
        ) as runs:
            runs.open("compute", "standard", sums=False)
            # The standard model's sums as they are on this host, then on slower and slower links.
            latency_s = 0.0
            for _ in range(_CALIBRATIONS):
                runs.open("standard", "standard", latency_s=latency_s)
                result = {name: median(each) for name, each in timed("compute", "standard").items()}
                short = result["compute"] / (1 - _SHARE) - result["standard"]
                if abs(short) < _CLOSE * result["standard"]:
                    break
                latency_s = max(0.0, latency_s + short / sums)
            runs.open("ours", ours, latency_s=latency_s)
            runs.open("parallel", "parallel", latency_s=latency_s)
            each = timed("compute", "ours", "standard", "parallel", rounds=self.rounds)
        run.put("decode", each["ours"], each["standard"])
        alone = zip(each["compute"], each["standard"], strict=True)
        longest = (max(compute, standard - compute) for compute, standard in alone)
        run.put("of_prediction", each["ours"], longest)
        share = 1 - median(each["compute"]) / median(each["standard"])
        steps = ", ".join(
            f"{name} {1e3 * median(seconds) / self.tokens:.1f}" for name, seconds in each.items()
        )
        run.profile = (
            f"ms a step: {steps}; {share:.0%} of the standard step is sums, {sums} an answer"
        )


_VOCAB = 1024


def _config(kind: str, hidden: int, layers: int) -> ModelConfig:
    """A model whose attention and feed-forward layer take about as long."""
    return llama(
        hidden, layers, max(2, hidden // 64), vocab=_VOCAB, ffn=2 * hidden, head_dim=64,
        family="parallel" if kind == "parallel" else "llama", initializer_range=0.1, tied=True,
        architecture={"residual": "ladder" if kind == "ladder" else "standard"},
    )  # fmt: skip


class _Counting:
    """Notes, of every sum, how many had begun when it was waited for."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self.begun, self.late = comm, 0, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(self, x: Any, **options: Any) -> Any:
        pending, number = self._comm.all_reduce(x, **options), self.begun
        self.begun += 1

        class Waited:
            def wait(_) -> None:  # noqa: N805
                self.late.append(self.begun - number - 1)
                pending.wait()

        return Waited()


class _Weights:
    """The parameters of a model in memory, as those of a directory."""

    def __init__(self, model: Transformer) -> None:
        self.config, self.dtype = model.config, model.weight.dtype
        self._found = dict(model.named_parameters())

    def __call__(self, name: str) -> Tensor:
        return self._found[name].detach().reshape(-1)


def _attend(layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
    """Attention of one sequence from its beginning."""
    from shoal.model.attention import attend

    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_NHd, k_NKd, v_NKd))
    return attend(q, k, v, None, causal=True)[0].transpose(0, 1)


def counted(kind: str, seed: int) -> tuple[int, int, int]:
    """Sums of a pass on two ranks; how many had begun before each was waited for; wrong tokens."""
    import torch

    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.serve.engine.build import prepare
    from shoal.serve.ranks.boundary import RankBoundary
    from shoal.serve.ranks.part import PartModel
    from shoal.train.zoo import random

    config = _config(kind, 128, 4)
    job = serve_job(kind)
    tokens = torch.from_numpy(generator(seed, purpose="prompt").integers(0, _VOCAB, 48))
    places = torch.arange(len(tokens))

    def rank(comm: Comm) -> tuple[_Counting, Tensor | None]:
        log: Any = _Counting(comm)
        alone = RankBoundary(comm.split([[0], [1]]), config.hidden, torch.float32)
        model = PartModel(job, _Weights(random(config, seed)), log, alone, range(4))  # type: ignore[arg-type]
        log.begun, log.late = 0, []
        with torch.inference_mode():
            hidden = model.flat(tokens, places, _attend)
            assert hidden is not None
            return log, model.logits(hidden)

    (log, shared), _ = run_ranks(2, rank)
    assert shared is not None
    with torch.inference_mode():
        whole = prepare(job, random(config, seed))
        want = whole.logits(whole.flat(tokens, places, _attend))
    # The embedding is a sum too; it begins and ends before the first layer.
    late = log.late[1:-2]
    return log.begun, min(late), int((shared.argmax(-1) != want.argmax(-1)).sum())


class Decoding:
    """Engines of two processes each, which generate from the same prompts in turn."""

    def __init__(
        self, folder: Path, hidden: int, layers: int, requests: int, tokens: int, seed: int
    ) -> None:
        self._folder, self._sizes = folder, (hidden, layers)
        self._requests, self._tokens, self._seed = requests, tokens, seed
        self._engines: dict[str, RankedEngine] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines.values():
            engine.close()

    def open(self, name: str, kind: str, **emulated: Any) -> None:
        """Start two ranks, in the place of those of this name; ``emulated``: of their runner."""
        from shoal.model import huggingface
        from shoal.serve.ranks.workers import ranked_engine
        from shoal.train.zoo import random

        directory = self._folder / kind
        if not directory.exists():
            huggingface.write(directory, random(_config(kind, *self._sizes), self._seed))
        kv = {"name": "paged", "prefix_reuse": False}
        job = serve_job(directory, kv_tokens=4096, parallel={"tp": 2}, kv=kv)
        config = huggingface.read_config(directory)
        if name in self._engines:
            self._engines.pop(name).close()
        self._engines[name] = ranked_engine(job, config, **emulated)
        self.run(name)

    def run(self, name: str) -> None:
        """Generate all tokens of all requests."""
        prompts = (
            generator(self._seed, purpose="prompt", index=number).integers(0, _VOCAB, 4).tolist()
            for number in range(self._requests)
        )
        served(self._engines[name], requests(prompts, self._tokens))
