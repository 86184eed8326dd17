"""[63] Ladder-residual: the sums of tensor parallelism hidden behind the next sub-layer.

- Mini-models of bytes, standard and ladder, from the same weights on the same text in the same
  order: the loss on held-out text, three seeds.
- The trained standard models, their upper half rewired, after a tenth of the steps more, beside
  the standard models after as many.
- Two processes that share every layer decode eight requests at once through the engine. A sum over
  the ranks is there a fixed time after it began, on one emulated link, the same for all models.
  That time is chosen so that the standard model's step takes five thirds of what it takes without
  any sums: two fifths of it are communication. Beside the same engine with the standard model,
  whose sums are waited for at once, and with the parallel block's.

The A/A run puts the standard model in the place of the ladder.

Source: Zhang et al., Ladder-Residual: Parallelism-Aware Architecture for Accelerating Large Model
Inference with Communication Overlapping, 2025.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.ir import Architecture

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer

__all__ = ["LadderClaim"]

# Of the standard model's step, in communication; how near the link's time brings it, and in how
# many trials.
_SHARE = 0.4
_CLOSE = 0.02
_CALIBRATIONS = 4
_REQUESTS = 8


@part
class LadderClaim(BaseClaim):
    """Loss of three seeds, and decoding on two ranks, beside the standard model.

    Args:
        seeds: trainings of each kind.
        steps: of one training.
        deep: blocks of the models that are trained; reading late costs a shallow one more.
        hidden: width of the model that is decoded with.
        layers: its blocks.
        tokens: that each request generates.
        rounds: timed pairs.
    """

    seeds: Annotated[int, Ge(1)] = 3
    steps: Annotated[int, Ge(1)] = 250
    deep: Annotated[int, Ge(1)] = 8
    hidden: Annotated[int, Ge(1)] = 768
    layers: Annotated[int, Ge(1)] = 8
    tokens: Annotated[int, Ge(1)] = 24
    rounds: Annotated[int, Ge(1)] = 16

    rows: ClassVar[tuple[int, ...]] = (63,)

    def collect(self, run: ClaimRun) -> None:
        """Count the sums; then, unless it is quick, train and decode."""
        from shoal.claims.experiments.ladder_ranks import counted

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
        losses: dict[str, list[float]] = {name: [] for name in ("ours", "standard")}
        after: dict[str, list[float]] = {name: [] for name in ("converted", "standard")}

        def loss_of(model: Transformer) -> float:
            return heldout(model, data.heldout, recipe)

        for number in range(self.seeds):
            seed = run.seed + number
            run.progress(f"training, seed {seed}", number / self.seeds * 0.8)

            def made(name: str, seed: int = seed) -> Transformer:
                config = mini(128, self.deep, architecture={"residual": name})
                return train(random(config, seed), data.train, recipe, seed)

            def on(model: Transformer, seed: int = seed) -> float:
                return loss_of(train(model, data.train, more, seed, first=self.steps))

            standard = run.remember(f"standard {seed}", lambda: made("standard"))
            losses["standard"].append(loss_of(standard))
            losses["ours"].append(run.remember(f"{ours} {seed} loss", lambda: loss_of(made(ours))))
            wiring: dict[str, Any] = {"name": ours}
            if ours == "ladder":
                wiring |= {"layers": "upper_half", "rewire": True}
            half = rebuilt(
                copy.deepcopy(standard), Architecture.model_validate({"residual": wiring})
            )
            whole = copy.deepcopy(standard)
            after["standard"].append(run.remember(f"standard {seed} on", partial(on, whole)))
            after["converted"].append(on(half))
        run.put("loss", losses["ours"], losses["standard"])
        run.put("converted_loss", after["converted"], after["standard"])
        run.details["training"] = {
            "steps": self.steps,
            "bytes_a_step": recipe.batch * recipe.length,
            "loss": losses,
            "loss_after_a_tenth_more": after,
        }

    def _decode(self, run: ClaimRun, ours: str) -> None:
        """Decode in turn; says where the time of a step goes."""
        from shoal.claims.experiments.ladder_ranks import Decoding

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
        every = _REQUESTS * self.tokens
        share = 1 - median(each["compute"]) / median(each["standard"])
        run.details["decoding"] = {
            "link_s": latency_s,
            "communication_share": share,
            "tokens_per_s": {name: every / median(seconds) for name, seconds in each.items()},
        }
        steps = ", ".join(
            f"{name} {1e3 * median(seconds) / self.tokens:.1f}" for name, seconds in each.items()
        )
        run.profile = (
            f"ms a step: {steps}; {share:.0%} of the standard step is sums, {sums} an answer"
        )
