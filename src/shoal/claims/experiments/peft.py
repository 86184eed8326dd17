"""[66] PEFT: do a few percent of the parameters learn what all of them learn, for less?

Source: Han et al., Parameter-Efficient Fine-Tuning for Large Models: A Comprehensive Survey, 2024.

A mini-model is tuned on another domain wholly and by the methods of the survey, same batches and
steps, each at the rate and up to the step that are best on a held-out part. Times are those of a
step beside Hugging Face's ``peft`` on one module, and of batches of requests for sixteen adapters,
for one, and one by one. In the A/A run all weights are trained, and the library computes.
"""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.peft_learning import (
    FULL,
    make_base,
    mini_model,
    texts,
    tune,
)
from shoal.claims.experiments.tiny import requests, serve_job, served
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import part, table
from shoal.core.random import generator
from shoal.kernel.threads import torch_threads

if TYPE_CHECKING:
    from torch import nn

    from shoal.model.transformer import Transformer

_EVERY = "*_proj"
_ADAPTERS = 16

# Method -> options and learning rates, of which the grids of those that are judged have three.
_METHODS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    FULL: ({}, (1e-3, 3e-3, 1e-2)),
    "lora": ({"r": 4, "targets": _EVERY}, (6e-3, 1.2e-2, 2.4e-2)),
    "dora": ({"r": 3, "targets": _EVERY}, (6e-3, 1.2e-2, 2.4e-2)),
    "adalora": ({"r": 4, "target": 3, "targets": _EVERY}, (6e-3, 1.2e-2, 2.4e-2)),
    "vera": ({"r": 128, "targets": _EVERY}, (1e-2, 3e-2)),
    "ia3": ({}, (1e-2, 3e-2)),
    "bitfit": ({}, (6e-3, 2e-2)),
    "adapter": ({"bottleneck": 16}, (3e-3, 1e-2)),
    "prefix": ({"tokens": 16}, (1e-2, 3e-2)),
    "qlora": ({"r": 4, "targets": _EVERY}, (6e-3, 1.2e-2)),
    "mezo": ({}, (1e-6, 4e-6)),
}
# The LoRA class, which is judged.
_CLASS = ("lora", "dora", "adalora")
# Tunings under way at a time, each on one thread.
_AT_A_TIME = 2


@part
class PeftClaim(BaseClaim, row=66, needs=("torch", "peft", "transformers")):
    """Methods of fine-tuning on one shifted domain.

    Args:
        hidden: width of the mini-model.
        layers: blocks of the model.
        pretrain: steps on documentation.
        steps: steps of each tuning.
        seeds: seeds of the tunings that are judged; the others have one.
        batch: sequences of a step.
        length: bytes of a sequence.
        pairs: rounds of timed steps.
        rounds: rounds of timed batches of requests.
    """

    hidden: Annotated[int, MultipleOf(64)] = 192
    layers: Annotated[int, Ge(1)] = 4
    pretrain: Annotated[int, Ge(1)] = 1500
    steps: Annotated[int, Ge(1)] = 120
    seeds: Annotated[int, Ge(1)] = 3
    batch: Annotated[int, Ge(1)] = 8
    length: Annotated[int, Ge(1)] = 128
    pairs: Annotated[int, Ge(1)] = 31
    rounds: Annotated[int, Ge(1)] = 15

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        run.progress("counting", 0.02)
        self._count(run)
        if run.quick:
            return
        if run.as_baseline:
            run.put("lora_class_gain", 0.0)  # a model that is not trained gains nothing
        else:
            with torch_threads(_AT_A_TIME):
                gains = self._learned(run)
            run.put("lora_class_gain", (gains[name] for name in _CLASS))
        run.progress("steps beside the library", 0.85)
        self._steps(run)
        run.progress("batches of requests", 0.92)
        self._served(run)
        run.profile = ", ".join(
            f"{name}: {1e3 * float(np.median(run.metrics[name].method)):.1f} ms beside "
            f"{1e3 * float(np.median(run.metrics[name].baseline)):.1f} ms"
            for name in ("step", "batch_of_16", "over_separate")
        )

    # ------------------------------------------------------------------ what is counted

    def _count(self, run: ClaimRun) -> None:
        """Parameters, bytes and answers."""
        shares, bytes_of = [], []
        for name in _CLASS:
            model = mini_model(self, run.seed)
            whole = sum(p.numel() for p in model.parameters())
            if not run.as_baseline:
                _method(name).inject(model)
            trained = [p for p in model.parameters() if p.requires_grad]
            shares.append(sum(p.numel() for p in trained) / whole)
            bytes_of.append(_step_bytes(model, trained))
        model, quantised = (mini_model(self, run.seed) for _ in range(2))
        everything, linears = _step_bytes(model, list(model.parameters())), _linear_bytes(model)
        if not run.as_baseline:
            _method("qlora").inject(quantised)
        kept = {name: self._kept(run.seed, name) for name in ("lora", "lora_fa")}
        run.put("trained_share", shares)
        run.put("gradient_and_optimizer_bytes", bytes_of, [everything] * len(bytes_of))
        run.put("qlora_weight_bytes", _linear_bytes(quantised) * run.pick(1.0, 0.5), linears / 2)
        run.put("lora_fa_activations", kept[run.pick("lora_fa", "lora")], kept["lora"])
        run.put("wrong_answers", self._wrong(run.context))

    def _kept(self, seed: int, name: str) -> int:
        """Bytes that a forward pass keeps for the backward pass, parameters not counted."""
        import torch

        from shoal.claims.bench.attention.memory import SavedBytes

        model = mini_model(self, seed)
        table("peft").build({"name": name, "r": 5, "targets": _EVERY}).inject(model)
        x = torch.zeros(2, self.length, dtype=torch.int64)
        with SavedBytes(model.parameters()) as saved:
            loss = model.loss_sum(x, x)
        del loss  # Until here, so that no storage is given out twice.
        return saved.bytes

    def _wrong(self, context: ExperimentContext) -> int:
        """Requests in a mixed batch whose answer is not that of their own merged model."""
        base, places, merged = self._adapters(context, count=3)
        requests = [(prompt, n % 4 - 1) for n, prompt in enumerate(self._prompts(context.seed, 8))]
        mixed = _answers(_engine(base, places), requests, 8)
        wrong = 0
        for (prompt, number), tokens in zip(requests, mixed, strict=True):
            alone = base if number < 0 else merged[number]
            wrong += _answers(_engine(alone, []), [(prompt, -1)], 8)[0] != tokens
        return wrong

    def _prompts(self, seed: int, count: int) -> list[list[int]]:
        random = generator(seed, purpose="peft prompts")
        return random.integers(0, 256, (count, 24)).tolist()  # type: ignore[no-any-return]

    def _adapters(
        self, context: ExperimentContext, *, count: int
    ) -> tuple[Transformer, list[Path], list[Transformer]]:
        """A base with random weights, adapter directories, and its merged models."""
        import torch

        from shoal.train.peft import files

        base = mini_model(self, context.seed).requires_grad_(False).eval()
        places, merged = [], []
        for number in range(count):
            place = context.work_dir / f"adapter-{number}-{count}"
            own = copy.deepcopy(base)
            handle = table("peft").build({"name": "lora", "r": 8}).inject(own, seed=number)
            source = torch.Generator().manual_seed(number)
            with torch.no_grad():
                for value in handle.trainable().values():
                    value.add_(torch.randn(value.shape, generator=source) * 0.1)
            if not place.exists():
                files.write(place, handle)
            merged.append(handle.keep_merged().eval())
            places.append(place)
        return base, places, merged

    # ------------------------------------------------------------------ what is learned

    def _learned(self, run: ClaimRun) -> dict[str, float]:
        """Method -> its drop of the loss as a share of full tuning's."""
        from shoal.core.pool import POOLS

        run.progress("training on documentation", 0.02)
        place, seed = run.work_dir, run.seed
        before = make_base(self, texts(run.context.data), place, seed)
        with torch_threads(1), POOLS.build({"name": "local", "workers": _AT_A_TIME}).open() as pool:

            def tuned(name: str, lr: float, seed: int) -> Any:
                return pool.submit(tune, place, self, name, _METHODS[name][0], lr, seed)

            run.progress("rates of learning", 0.3)
            swept = {
                (name, lr): tuned(name, lr, seed)
                for name, (_, rates) in _METHODS.items()
                for lr in rates
            }
            tests, again = {}, {}
            for name, (_, rates) in _METHODS.items():
                tried = {lr: swept[name, lr].result() for lr in rates}
                best = min(rates, key=lambda lr, tried=tried: tried[lr][0])  # type: ignore[misc]
                tests[name] = [tried[best][1]]
                if name in (FULL, *_CLASS):
                    again[name] = [tuned(name, best, seed + n) for n in range(1, self.seeds)]
            run.progress("other seeds", 0.7)
            for name, some in again.items():
                tests[name] += [future.result()[1] for future in some]
        drops = {name: [before - test for test in some] for name, some in tests.items()}
        gains = {
            name: float(np.mean([d / f for d, f in zip(some, drops[FULL], strict=False)]))
            for name, some in drops.items()
        }
        # Of methods that are not judged as well.
        run.details["gains"] = gains
        return gains

    # ------------------------------------------------------------------ what is timed

    def _steps(self, run: ClaimRun) -> None:
        """Training steps of one module of another library, by our LoRA and by the library's."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ways = {
                "method": _library_step(run.as_baseline, run.seed),
                "baseline": _library_step(True, run.seed),
            }
            times = run.race(ways, self.pairs, warmup=3, threads=1, swaps={})
        run.put("step", times["method"], times["baseline"])

    def _served(self, run: ClaimRun) -> None:
        """Batches of requests: for sixteen adapters, for one, and one request after the other."""
        base, places, _ = self._adapters(run.context, count=_ADAPTERS)
        engine = _engine(base, places)
        prompts = self._prompts(run.seed, _ADAPTERS)

        def together(adapters: list[int]) -> None:
            _answers(engine, list(zip(prompts, adapters, strict=True)), 32)

        def apart() -> None:
            for number, prompt in enumerate(prompts):
                _answers(engine, [(prompt, number)], 32)

        ways: dict[str, Any] = {
            "many": functools.partial(together, list(range(_ADAPTERS))),
            "one": functools.partial(together, [0] * _ADAPTERS),
            "apart": apart,
        }
        times = run.race(ways, self.rounds, threads=1, swaps={"many": "apart"})
        run.put("batch_of_16", times["many"], times["one"])
        run.put("over_separate", times["many"], times["apart"])


def _method(name: str) -> Any:
    return table("peft").build({"name": name, **_METHODS[name][0]})


def _step_bytes(model: Transformer, trained: list[nn.Parameter]) -> int:
    """Bytes of gradients and of the optimizer's state after a step, really made."""
    import torch

    optimizer = torch.optim.AdamW(trained, lr=0.0)
    x = torch.zeros(1, 8, dtype=torch.int64)
    torch.autograd.backward(model.loss_sum(x, x))
    optimizer.step()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    moments = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    return gradients + moments


def _linear_bytes(model: Transformer) -> int:
    """Bytes of the base's matrices in the blocks."""
    import torch

    from shoal.train.peft.run.nf4 import NF4Linear
    from shoal.train.peft.run.sites import AdaptedLinear, all_sites

    total = 0
    for owner in dict.fromkeys(site.owner for site in all_sites(model)):
        module = model.get_submodule(owner)
        base = module.base if isinstance(module, AdaptedLinear) else module
        if isinstance(base, NF4Linear):
            total += base.nbytes
        else:
            assert isinstance(base.weight, torch.Tensor)
            total += base.weight.nbytes
    return total


def _engine(model: Transformer, places: list[Path]) -> Any:
    from shoal.serve.engine.build import engine_of, prepare

    adapters = {str(number): str(place) for number, place in enumerate(places)}
    job = serve_job(kv_tokens=8192, adapters=adapters)
    return engine_of(job, prepare(job, copy.deepcopy(model)))[0]


def _answers(engine: Any, asked: list[tuple[list[int], int]], tokens: int) -> list[list[int]]:
    """New tokens of (prompt, number of its adapter or -1) each, all at once."""
    some = requests([prompt for prompt, _ in asked], tokens)
    for request, (_, number) in zip(some, asked, strict=True):
        request.adapter = None if number < 0 else str(number)
    return served(engine, some)


def _library_step(theirs: bool, seed: int) -> Any:
    """A training step of a Llama of the transformers library with LoRA on all its layers."""
    import peft
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(seed)
    model: Any = transformers.LlamaForCausalLM(config)
    if theirs:
        own = peft.LoraConfig(
            r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, own)
    else:
        table("peft").build({"name": "lora", "r": 8, "targets": _EVERY}).inject(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    x = torch.randint(0, 512, (4, 128))

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(input_ids=x, labels=x).loss)
        optimizer.step()

    return step
